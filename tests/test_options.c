/* The option table, its parser and what is made from it. */
#include "support.h"

#include "cli/help.h"
#include "cli/options.h"

static struct options parsed;
static linnet_error err;

/* Parses "linnet WORD WORD ..."; words end with NULL. */
static linnet_status parse(const char *const *words)
{
    char *argv[64] = {(char *)(uintptr_t) "linnet"};
    int argc = 1;
    options_free(&parsed);
    for (; words[argc - 1]; argc++) argv[argc] = (char *)(uintptr_t)words[argc - 1];
    memset(&err, 0, sizeof err);
    return options_parse(argc, argv, &parsed, &err);
}

#define PARSE(...) parse((const char *const[]){__VA_ARGS__, NULL})

#define assert_refused(status, text)                                          \
    do {                                                                      \
        assert_int_equal(status, LINNET_INVALID);                             \
        if (!strstr(err.message, text))                                       \
            fail_msg("expected '%s' in the message '%s'", text, err.message); \
    } while (0)

/* A value that the option takes. */
static const char *good_value(const struct option_spec *spec, char *buffer, size_t size)
{
    switch (spec->kind) {
    case OPTION_KIND_INTEGER:
    case OPTION_KIND_INTEGERS: snprintf(buffer, size, "%.0f", spec->min + 1); break;
    case OPTION_KIND_NUMBER: snprintf(buffer, size, "%g", spec->max); break;
    case OPTION_KIND_SIZE: return "2G";
    case OPTION_KIND_CHOICE:
        snprintf(buffer, size, "%.*s", (int)strcspn(spec->choices, "|"), spec->choices);
        break;
    default: return "text";
    }
    return buffer;
}

static enum command first_command(const struct option_spec *spec)
{
    for (int c = 0; c < COMMAND_COUNT; c++)
        if (spec->commands & 1u << c) return (enum command)c;
    fail_msg("--%s belongs to no command", spec->name);
    return COMMAND_NONE;
}

static void check_spelling(const struct option_spec *spec, int id, const char *dashes,
                           const char *name)
{
    char buffer[64], separate[80], joined[160];
    const char *command = command_table[first_command(spec)].name;
    const char *value = good_value(spec, buffer, sizeof buffer);
    snprintf(separate, sizeof separate, "%s%s", dashes, name);
    if (spec->kind == OPTION_KIND_FLAG) {
        assert_ok(PARSE(command, separate), err);
        assert_true(parsed.given[id]);
        assert_true(*(bool *)((char *)&parsed + spec->offset));
        snprintf(joined, sizeof joined, "--%s=1", spec->name);
        assert_refused(PARSE(command, joined), "takes no value");
        return;
    }
    assert_ok(PARSE(command, separate, value), err);
    assert_true(parsed.given[id]);
    assert_ok(PARSE(separate, value, command), err);
    assert_int_equal(parsed.command, first_command(spec));
    snprintf(joined, sizeof joined, "%s=%s", separate, value);
    assert_ok(PARSE(command, joined), err);
    assert_true(parsed.given[id]);
    assert_refused(PARSE(command, separate), "needs a value");
}

static void every_option_in_every_spelling(void **state)
{
    (void)state;
    for (int i = 0; i < OPTION_COUNT; i++) {
        const struct option_spec *spec = &option_table[i];
        char letter[2] = {spec->letter, 0};
        assert_non_null(spec->name);
        assert_non_null(spec->help);
        check_spelling(spec, i, "--", spec->name);
        if (spec->other) check_spelling(spec, i, "--", spec->other);
        if (spec->letter) check_spelling(spec, i, "-", letter);
        for (int k = 0; k < i; k++) {
            assert_string_not_equal(spec->name, option_table[k].name);
            if (spec->letter) assert_int_not_equal(spec->letter, option_table[k].letter);
        }
    }
}

/* The names that interfaces.md promises. */
static void promised_names(void **state)
{
    (void)state;
    assert_ok(PARSE("run", "-m", "x", "--device", "cuda:1", "-t", "2", "-c", "512", "-n8", "--temp",
                    "0.5", "--top-p", "0.9", "--top-k", "40", "--min-p", "0.1", "--repeat-penalty",
                    "1.1", "--", "--prompt"),
              err);
    assert_string_equal(parsed.model, "x");
    assert_string_equal(parsed.device, "cuda:1");
    assert_int_equal(parsed.threads, 2);
    assert_int_equal(parsed.max_model_len, 512);
    assert_int_equal(parsed.max_tokens, 8);
    assert_true(parsed.temperature == 0.5);
    assert_true(parsed.repetition_penalty == 1.1);
    assert_int_equal(parsed.arguments.n, 1);
    assert_string_equal(parsed.arguments.items[0], "--prompt");

    assert_ok(PARSE("batch", "--max-model-len=512", "--max-num-seqs", "4",
                    "--max-num-batched-tokens", "64", "--kv-cache-memory", "1.5GiB",
                    "--no-prefix-caching", "--enforce-eager", "--kv-cache-dtype=int8", "--numa",
                    "interleave", "-qv"),
              err);
    assert_int_equal(parsed.kv_cache_memory, 1610612736);
    assert_string_equal(parsed.kv_cache_dtype, "int8");
    assert_string_equal(parsed.numa, "interleave");
    assert_true(parsed.quiet && parsed.verbose && parsed.enforce_eager && parsed.no_prefix_caching);

    assert_ok(PARSE("run", "hello", "--stop", "a", "--stop=b", "--prompt-ids", "1,2, 3",
                    "--presence-penalty", "-0.5", "--frequency-penalty=2", "--logprobs", "0"),
              err);
    assert_int_equal(parsed.stop.n, 2);
    assert_string_equal(parsed.stop.items[1], "b");
    assert_int_equal(parsed.prompt_ids.n, 3);
    assert_int_equal(parsed.prompt_ids.items[2], 3);
    assert_true(parsed.presence_penalty == -0.5);
    assert_true(parsed.given[OPTION_LOGPROBS]);
    assert_false(parsed.given[OPTION_TEMPERATURE]);
}

static void nearest_spellings(void **state)
{
    (void)state;
    assert_refused(PARSE("run", "--temprature", "0"), "did you mean '--temperature'?");
    assert_refused(PARSE("run", "--max-token", "0"), "did you mean '--max-tokens'?");
    assert_refused(PARSE("run", "--max-toknes=3"), "did you mean '--max-tokens'?");
    assert_refused(PARSE("run", "--jsno"), "did you mean '--json'?");
    assert_refused(PARSE("run", "--top_p", "1"), "did you mean '--top-p'?");
    assert_refused(PARSE("run", "-temp", "0"), "did you mean '--temp'?");
    assert_refused(PARSE("inspect", "--tensor"), "did you mean '--tensors'?");
    assert_refused(PARSE("rnu"), "did you mean 'run'?");
    assert_refused(PARSE("tokenise"), "did you mean 'tokenize'?");
    assert_refused(PARSE("run", "--zzzzzzzzzzzzzzzz"), "'linnet run --help'");
    assert_refused(PARSE("zzzzzzzzzzzzzz"), "'linnet --help'");
    /* the name of another command's option is no slip */
    assert_refused(PARSE("inspect", "--stop", "x"), "not one of 'linnet inspect'");
}

static void values_out_of_range(void **state)
{
    (void)state;
    static const char *const bad[][2] = {
        {"--temperature", "-0.1"},
        {"--temperature", "nan"},
        {"--temperature", "warm"},
        {"--top-p", "0"},
        {"--top-p", "1.01"},
        {"--min-p", "-1"},
        {"--top-k", "-1"},
        {"--top-k", "1.5"},
        {"--max-tokens", "0"},
        {"--max-tokens", "8x"},
        {"--seed", "-1"},
        {"--seed", "9223372036854775808"},
        {"--presence-penalty", "2.5"},
        {"--repetition-penalty", "0"},
        {"--threads", "0"},
        {"--kv-cache-memory", "2Q"},
        {"--kv-cache-memory", "-1G"},
        {"--kv-cache-memory", "0"},
        {"--device", "gpu"},
        {"--device", "cuda:"},
        {"--device", "cuda:x"},
        {"--prompt-ids", "1,x"},
        {"--prompt-ids", "-1"},
        {"--prompt-ids", ""},
        {"--prompt-ids", "2147483648"},
        {"--logprobs", "21"},
        {"--max-model-len", "99999999999"},
        {"--max-model-len", "1"},
        {"--max-num-seqs", "4097"},
        {"--max-num-batched-tokens", "262145"},
        {"--top-p", "1e-40"},
        {"--repetition-penalty", "0.00001"},
        {"--stop", ""},
        {"--kv-cache-memory", "5 "},
        {"--kv-cache-memory", "1 B"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        linnet_status status = PARSE("run", bad[i][0], bad[i][1]);
        assert_refused(status, bad[i][0]);
        assert_refused(status, "expected");
    }
    static const char *words[2 * 17 + 2] = {"run"};
    for (int i = 0; i < 17; i++) words[1 + 2 * i] = "--stop", words[2 + 2 * i] = "x";
    assert_refused(parse(words), "at most 16");
    words[2 * 16 + 1] = NULL;
    assert_ok(parse(words), err);
    assert_refused(PARSE("run", "two", "prompts"), "unexpected argument 'prompts'");
}

static void sizes(void **state)
{
    (void)state;
    int64_t bytes;
    assert_true(options_size("1500", &bytes) && bytes == 1500);
    assert_true(options_size("2G", &bytes) && bytes == INT64_C(2) << 30);
    assert_true(options_size("512MiB", &bytes) && bytes == 512 << 20);
    assert_true(options_size("1kb", &bytes) && bytes == 1024);
    assert_false(options_size("", &bytes));
    assert_false(options_size("i", &bytes));
    assert_false(options_size("1iB", &bytes));
    assert_false(options_size("1e30", &bytes));
    assert_false(options_size("5000000T", &bytes));
    assert_false(options_size("2G2", &bytes));
    assert_false(options_size("1 B", &bytes));
    assert_false(options_size("5 ", &bytes));
    assert_false(options_size(" 5", &bytes));
    assert_false(options_size("1@", &bytes)); /* a letter but for one bit */
    assert_true(options_size("3t", &bytes) && bytes == INT64_C(3) << 40);
}

static void assigned(void **state)
{
    (void)state;
    assert_ok(PARSE("chat"), err);
    assert_ok(options_assign(&parsed, "temperature", "0.25", &err), err);
    assert_true(parsed.temperature == 0.25 && parsed.given[OPTION_TEMPERATURE]);
    assert_refused(options_assign(&parsed, "top-p", "7", &err), "top-p");
    assert_false(parsed.given[OPTION_TOP_P]); /* what was refused leaves nothing behind */
    assert_true(parsed.top_p == 0);
    assert_refused(options_assign(&parsed, "temperature", "-1", &err), "temperature");
    assert_true(parsed.temperature == 0.25 && parsed.given[OPTION_TEMPERATURE]);
    assert_ok(options_assign(&parsed, "min-tokens", "9", &err), err);
    assert_refused(options_assign(&parsed, "max-tokens", "8", &err), "--min-tokens");
    assert_false(parsed.given[OPTION_MAX_TOKENS]);
    assert_refused(options_assign(&parsed, "tempreature", "7", &err), "--temperature");
    assert_ok(PARSE("bench", "--batch", "1,2"), err);
    assert_refused(options_assign(&parsed, "batch", "0", &err), "batch");
    assert_int_equal(parsed.batch.n, 2);
}

static void options_that_go_together(void **state)
{
    (void)state;
    static const struct {
        const char *words[8];
        const char *message; /* NULL: nothing wrong */
    } cases[] = {
        {{"run", "--min-tokens", "9", "-n", "8", "x"}, "--min-tokens"},
        {{"run", "--min-tokens", "8", "-n", "8", "x"}, NULL},
        {{"run", "--min-tokens", "9", "x"}, NULL},
        {{"batch", "--max-num-seqs", "9", "--max-num-batched-tokens", "8"}, "--max-num-seqs"},
        {{"batch", "--max-num-seqs", "9"}, NULL},
        {{"run", "--raw", "--system", "s", "x"}, "--system"},
        {{"run", "--prompt-ids", "1", "--raw"}, "--raw"},
        {{"run", "--prompt-ids", "1", "--system", "s"}, "--system"},
        {{"run", "--prompt-ids", "1", "x"}, "--prompt-ids"},
        {{"run", "--logprobs", "1", "x"}, "--json"},
        {{"run", "-f", "a", "x"}, "--file"},
        {{"bench", "--dtype", "q8_0"}, "--random"},
        {{"bench", "--dtype", "q8_0", "--random", "smollm2-135m"}, NULL},
        {{"bench", "--model", "a", "--random", "smollm2-135m"}, "which one?"},
        {{"bench", "--batch", "4", "--max-num-seqs", "2"}, "--batch"},
        {{"bench", "ladder", "--batch", "4"}, "--batch"},
        {{"bench", "ladder", "--repeat", "4"}, "--repeat"},
        {{"bench", "ladder", "--prompt", "4,5"}, "--prompt"},
        {{"bench", "ladder", "--seed", "4"}, "--seed"},
        {{"bench", "ladder", "--prompt", "4", "--generated", "5"}, NULL},
        {{"bench", "lader"}, "did you mean 'ladder'?"},
        {{"bench", "limit"}, "did you mean 'limits'?"},
        {{"bench", "ladder", "--generated", "0"}, "--generated 0"},
        {{"bench", "--generated", "0"}, NULL},
        {{"bench", "ladder", "--operations"}, "--operations"},
        {{"bench", "--operations", "--batch", "4", "--prompt", "7", "--repeat", "2"}, NULL},
        {{"bench", "--operations", "--seed", "4"}, "--seed"},
        {{"bench", "--operations", "--seed", "4", "--random", "smollm2-135m"}, NULL},
        {{"bench", "limits", "--threads", "2", "--device", "cpu", "--json"}, NULL},
        {{"bench", "limits", "--model", "a"}, "--model"},
        {{"bench", "limits", "--operations"}, "--operations"},
        {{"tokenize", "--decode", "--special", "1"}, "--special"},
        {{"tokenize", "--decode", "--chat", "1"}, "--chat"},
        {{"tokenize", "--model", "a", "--tokenizer", "b", "1"}, "which one?"},
        {{"inspect", "-m", "a", "b"}, "which one?"},
        {{"check", "-m", "a", "b"}, "which one?"},
        {{"inspect", "a"}, NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_ok(parse(cases[i].words), err);
        linnet_status status = options_check(&parsed, &err);
        if (cases[i].message)
            assert_refused(status, cases[i].message);
        else
            assert_ok(status, err);
    }
}

/* The name as the manual page writes it. */
static void roff_name(const char *name, char *out)
{
    for (; *name; name++) {
        if (*name == '-') *out++ = '\\';
        *out++ = *name;
    }
    *out = 0;
}

static void texts_name_every_option(void **state)
{
    (void)state;
    struct strbuf man = {0}, bash = {0}, zsh = {0}, help = {0};
    help_man(&man);
    help_bash(&bash);
    help_zsh(&zsh);
    for (int i = 0; i < OPTION_COUNT; i++) {
        const struct option_spec *spec = &option_table[i];
        char name[64], roff[128];
        snprintf(name, sizeof name, "--%s", spec->name);
        strbuf_clear(&help);
        help_command(first_command(spec), &help);
        assert_non_null(strstr(strbuf_cstr(&help), name));
        assert_non_null(strstr(strbuf_cstr(&bash), name));
        assert_non_null(strstr(strbuf_cstr(&zsh), name));
        roff_name(name, roff);
        if (!strstr(strbuf_cstr(&man), roff)) fail_msg("the manual page lacks %s", roff);
    }
    strbuf_clear(&help);
    help_command(COMMAND_NONE, &help);
    for (int c = 0; c < COMMAND_COUNT; c++)
        if (!command_table[c].hidden)
            assert_non_null(strstr(strbuf_cstr(&help), command_table[c].summary));
    strbuf_free(&man);
    strbuf_free(&bash);
    strbuf_free(&zsh);
    strbuf_free(&help);
}

static int release(void **state)
{
    (void)state;
    options_free(&parsed);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_option_in_every_spelling),
        cmocka_unit_test(promised_names),
        cmocka_unit_test(nearest_spellings),
        cmocka_unit_test(values_out_of_range),
        cmocka_unit_test(sizes),
        cmocka_unit_test(assigned),
        cmocka_unit_test(options_that_go_together),
        cmocka_unit_test(texts_name_every_option),
    };
    return cmocka_run_group_tests(tests, NULL, release);
}
