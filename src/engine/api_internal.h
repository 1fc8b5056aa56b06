/* api_internal.h - from a model and options to an engine. */
#ifndef LINNET_ENGINE_API_INTERNAL_H
#define LINNET_ENGINE_API_INTERNAL_H

#include "engine/engine_internal.h"
#include "engine/model_internal.h"

/* Where a model computes. */
struct device {
    const struct ops *ops;
    const char *text;   /* for people; static */
    int64_t available;  /* bytes free on it */
    bool gpu;           /* with memory of its own */
    const char *reason; /* why "auto" took no GPU, or NULL; static */
};

/* "auto" (or NULL) takes a usable GPU, else the CPU. */
linnet_status find_device(const char *name, struct device *out, linnet_error *err);

/* Bytes that this process may still take: the machine's and its control group's. */
int64_t available_memory(void);

/* linnet_engine_plan for a device that is found. */
linnet_status plan_on(const linnet_model *m, const linnet_engine_options *o,
                      const struct device *device, linnet_plan *plan, linnet_error *err);

struct limits plan_limits(const linnet_plan *plan, const linnet_engine_options *o);
/* What was asked for: KV_OWN where that is no known name. */
enum kv_type plan_kv(const linnet_engine_options *o);
/* The cache and the weights over all nodes' memory. */
bool plan_interleaves(const linnet_engine_options *o);
/* Whether both are known names, and the device can do so. */
linnet_status plan_check_device(const linnet_engine_options *o, const struct device *device,
                                linnet_error *err);

#endif
