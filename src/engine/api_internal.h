/* api_internal.h - from a model and options to an engine. */
#ifndef LINNET_ENGINE_API_INTERNAL_H
#define LINNET_ENGINE_API_INTERNAL_H

#include "engine/engine_internal.h"
#include "engine/model_internal.h"

struct device {
    const struct ops *ops;
    const char *text; /* for people; static */
};

linnet_status find_device(const char *name, struct device *out, linnet_error *err);

struct limits plan_limits(const linnet_plan *plan);

#endif
