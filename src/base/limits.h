/*
 * limits.h - the most and the least that may be asked for. The engine refuses what is beyond; the
 * program's options and the OpenAI messages refuse it earlier, by the same numbers.
 */
#ifndef LINNET_BASE_LIMITS_H
#define LINNET_BASE_LIMITS_H

enum {
    LIMIT_THREADS = 1024,
    LIMIT_SEQS = 4096,              /* in a step */
    LIMIT_BATCHED_TOKENS = 1 << 18, /* in a step */
    LIMIT_LEAST_CONTEXT = 2,        /* a token of the prompt and one of the answer */
    LIMIT_CHOICES = 128,            /* answers to a prompt */
    LIMIT_STOPS = 16,
    LIMIT_STOP_IDS = 128,
    LIMIT_LOGPROBS = 20
};

#define LIMIT_TEMPERATURE              1e4
#define LIMIT_LEAST_TOP_P              0x1p-126 /* the least normal float */
#define LIMIT_LEAST_REPETITION_PENALTY 1e-4
#define LIMIT_REPETITION_PENALTY       1e4
#define LIMIT_PENALTY                  2.0 /* presence and frequency, to both sides */

#endif
