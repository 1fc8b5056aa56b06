/* test_device.c - which device is taken and why, what a GPU's errors say, and what is planned for
 * one. No GPU is needed. */
#include <string.h>

#include "engine/api_internal.h"
#include "ops/gpu_error.h"
#include "support.h"

static void expect(const linnet_error *err, const char *words)
{
    if (!strstr(err->message, words)) fail_msg("\"%s\" is not in: %s", words, err->message);
}

static void devices(void **state)
{
    (void)state;
    linnet_device_info info;
    linnet_error err;
    assert_int_equal(linnet_device_find("cpu", &info, &err), LINNET_OK);
    char name[64]; /* whichever instructions there are */
    snprintf(name, sizeof name, "cpu (%s)", ops_cpu_kernels());
    assert_string_equal(info.name, name);
    assert_null(info.reason); /* it was asked for */
    assert_true(info.available > 0);
    assert_int_equal(linnet_device_find(NULL, &info, &err), LINNET_OK);
    linnet_status gpu = linnet_device_find("cuda", &info, &err);
    if (gpu) expect(&err, "use --device cpu");
    assert_int_equal(linnet_device_find("auto", &info, &err), LINNET_OK);
    assert_memory_equal(info.name, gpu ? "cpu (" : "cuda:", 5);
    assert_int_equal(info.reason != NULL, gpu != LINNET_OK);
    if (info.reason) assert_null(strstr(info.reason, "--device")); /* nothing has to be done */
    static const char *const unknown[] = {"tpu",     "cuda:", "cuda:x", "cuda:-1",
                                          "cuda:64", "CPU",   ""};
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++) {
        assert_int_equal(linnet_device_find(unknown[i], &info, &err), LINNET_INVALID);
        expect(&err, "\"cuda:N\"");
    }
}

static void gpu_errors(void **state)
{
    (void)state;
    static const struct {
        const char *name, *what, *words;
        linnet_status status;
    } cases[] = {
        {"cudaErrorNoDevice", NULL, "nvidia-smi must list one", LINNET_DEVICE},
        {"cudaErrorDevicesUnavailable", NULL, "held by another process", LINNET_DEVICE},
        {"cudaErrorNoKernelImageForDevice", "a step", "CMAKE_CUDA_ARCHITECTURES", LINNET_DEVICE},
        {"cudaErrorMemoryAllocation", "the cache", "memory for the cache: lower", LINNET_MEMORY},
        {"cudaErrorMemoryAllocation", NULL, "memory for its own bookkeeping", LINNET_MEMORY},
        {"cudaErrorIllegalAddress", "a step", "lost in a step (why)", LINNET_DEVICE},
        {"cudaErrorECCUncorrectable", "a step", "must be restarted", LINNET_DEVICE},
        {"cudaErrorInvalidValue", "a step", "the GPU failed in a step: why", LINNET_DEVICE},
        {"cudaErrorOfTomorrow", NULL, "the GPU cannot be used: why", LINNET_DEVICE},
    };
    linnet_error err;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(gpu_error(cases[i].name, "why", cases[i].what, &err), cases[i].status);
        assert_int_equal(err.status, cases[i].status);
        expect(&err, cases[i].words);
    }
    assert_int_equal(gpu_driver_error(0, 13000, &err), LINNET_DEVICE);
    expect(&err, "no NVIDIA driver is installed");
    expect(&err, "CUDA 13.0");
    assert_int_equal(gpu_driver_error(12040, 13000, &err), LINNET_DEVICE);
    expect(&err, "offers CUDA 12.4 and the backend needs 13.0");
}

/* The plan reads of a device no more than this. */
static struct device made_up_gpu(int64_t available)
{
    return (struct device){
        .ops = &ops_cpu, .text = "cuda:0 (made up)", .available = available, .gpu = true};
}

static void gpu_plans(void **state)
{
    (void)state;
    const int64_t gigabyte = 1000000000;
    linnet_model *model;
    linnet_plan plan;
    linnet_error err;
    linnet_engine_options o = {0};
    struct device gpu = made_up_gpu(100 * gigabyte);
    assert_int_equal(linnet_model_open(data_path("qwen3-tiny"), &model, &err), LINNET_OK);
    assert_int_equal(plan_on(model, &o, &gpu, &plan, &err), LINNET_OK);
    assert_string_equal(plan.device, "cuda:0 (made up)");
    assert_int_equal(plan.max_num_seqs, 256);
    assert_int_equal(plan.max_num_batched_tokens, 2048);
    assert_int_equal(plan.max_model_len, 40960);
    assert_true(plan.scratch > 0);
    assert_int_equal(plan.total, plan.weights + plan.kv_cache + plan.activations + plan.scratch);
    /* 85% of it, or every sequence at its longest */
    int64_t all = 256 * (40960 / plan.block_tokens),
            block = plan.block_tokens * plan.kv_bytes_per_token;
    if (plan.n_blocks != all) assert_in_range(plan.total, 85 * gigabyte - block, 85 * gigabyte);
    assert_true(plan.n_blocks <= all);

    o.max_model_len = 64; /* no more than can be used */
    assert_int_equal(plan_on(model, &o, &gpu, &plan, &err), LINNET_OK);
    assert_int_equal(plan.n_blocks, 256 * 4);

    o = (linnet_engine_options){.max_num_seqs = 2, .max_num_batched_tokens = 16};
    gpu = made_up_gpu(gigabyte / 2); /* little beside the scratch: half of what is left */
    assert_int_equal(plan_on(model, &o, &gpu, &plan, &err), LINNET_OK);
    int64_t left = plan.available - plan.weights - plan.activations - plan.scratch;
    assert_in_range(plan.kv_cache, left / 2 - block, left / 2);
    gpu = made_up_gpu(gigabyte / 4);
    assert_int_equal(plan_on(model, &o, &gpu, &plan, &err), LINNET_MEMORY);
    expect(&err, "are available on cuda:0 (made up)");
    expect(&err, "--device cpu");
    linnet_model_close(model);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(devices), cmocka_unit_test(gpu_errors),
                                       cmocka_unit_test(gpu_plans)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
