#include "cli/options.h"

#include "base/limits.h"

const struct command_spec command_table[COMMAND_COUNT] = {
    [COMMAND_RUN] = {"run", "[PROMPT]", "answer one prompt (argument, --file, or standard input)",
                     1, false, false},
    [COMMAND_CHAT] = {"chat", "", "talk with the model; /help lists its commands", 0, false, false},
    [COMMAND_BATCH] = {"batch", "[FILE]",
                       "answer a file of OpenAI batch requests (JSON lines), all at once", 1, false,
                       false},
    [COMMAND_SERVE] = {"serve", "", "HTTP server (not in this version)", 0, false, true},
    [COMMAND_BENCH] = {"bench", "[ladder]", "measure speed; 'ladder' compares the design's stages",
                       1, false, false},
    [COMMAND_TOKENIZE] = {"tokenize", "[TEXT]",
                          "token ids of a text, the way back, or a rendered chat", INT16_MAX, false,
                          false},
    [COMMAND_INSPECT] = {"inspect", "[MODEL]", "what a model file holds and what it will need", 1,
                         false, false},
    [COMMAND_CHECK] = {"check", "[MODEL]", "compare every operation with the plain reference", 1,
                       false, false},
    [COMMAND_GENERATE] = {"generate", "man|bash|zsh", "manual page or shell completion", 1, true,
                          false},
};

const char *const group_titles[GROUP_COUNT] = {
    [GROUP_MODEL] = "Model",      [GROUP_ENGINE] = "Engine",   [GROUP_SAMPLING] = "Sampling",
    [GROUP_INPUT] = "In and out", [GROUP_GENERAL] = "General",
};

/* Which commands an option belongs to. */
enum {
    RUN = 1 << COMMAND_RUN,
    CHAT = 1 << COMMAND_CHAT,
    BATCH = 1 << COMMAND_BATCH,
    BENCH = 1 << COMMAND_BENCH,
    TOKENIZE = 1 << COMMAND_TOKENIZE,
    INSPECT = 1 << COMMAND_INSPECT,
    CHECK = 1 << COMMAND_CHECK,
    ANSWERING = RUN | CHAT,
    ENGINE = RUN | CHAT | BATCH | BENCH | INSPECT,
    EVERY = (1 << COMMAND_COUNT) - 1
};

#define FIELD(name) offsetof(struct options, name)
#define FLAG        .kind = OPTION_KIND_FLAG
#define INTEGER     .kind = OPTION_KIND_INTEGER, .argument = "N"
#define NUMBER      .kind = OPTION_KIND_NUMBER, .argument = "F"
#define INTEGERS    .kind = OPTION_KIND_INTEGERS, .argument = "N,N,..."
#define UP_TO_I32   .max = INT32_MAX
#define NO_LIMIT    .max = 0x1p63

const struct option_spec option_table[OPTION_COUNT] = {
    [OPTION_MODEL] = {"model", NULL, 'm', OPTION_KIND_FILE, GROUP_MODEL, .argument = "PATH|NAME",
                      .commands = ENGINE | TOKENIZE | CHECK, .offset = FIELD(model),
                      .help = "a GGUF file, a Hugging Face directory, or a name in $LINNET_MODELS "
                              "or $XDG_DATA_HOME/linnet/models (default: what script/quickstart "
                              "installed)"},
    [OPTION_TOKENIZER] = {"tokenizer", NULL, 0, OPTION_KIND_FILE, GROUP_MODEL, .argument = "FILE",
                          .commands = TOKENIZE, .offset = FIELD(tokenizer),
                          .help = "a bare tokenizer.json in place of a model"},
    [OPTION_RANDOM] = {"random", NULL, 0, OPTION_KIND_CHOICE, GROUP_MODEL, .argument = "SHAPE",
                       .choices = "qwen2.5-0.5b|qwen2.5-1.5b|qwen2.5-7b|qwen3-0.6b|llama-3.2-1b|"
                                  "smollm2-135m",
                       .commands = BENCH, .offset = FIELD(random),
                       .help = "random weights of a known shape, made in memory, in place of a "
                               "model"},
    [OPTION_DTYPE] = {"dtype", NULL, 0, OPTION_KIND_CHOICE, GROUP_MODEL, .argument = "TYPE",
                      .choices = "bf16|f16|f32|q8_0|q4_0|q4_1", .commands = BENCH,
                      .offset = FIELD(dtype), .help = "type of the random weights (default bf16)"},

    [OPTION_DEVICE] = {"device", NULL, 0, OPTION_KIND_CHOICE, GROUP_ENGINE, .argument = "DEVICE",
                       .choices = "auto|cpu|cuda|cuda:N", .commands = ENGINE | CHECK,
                       .offset = FIELD(device), .help = "where to compute (default auto)"},
    [OPTION_THREADS] = {"threads", NULL, 't', INTEGER, .group = GROUP_ENGINE, .min = 1,
                        .max = LIMIT_THREADS, .commands = ENGINE | CHECK, .offset = FIELD(threads),
                        .help = "compute threads (default: the processors of this machine)"},
    [OPTION_MAX_MODEL_LEN] = {"max-model-len", "ctx-size", 'c', INTEGER, .group = GROUP_ENGINE,
                              .min = LIMIT_LEAST_CONTEXT, UP_TO_I32, .commands = ENGINE,
                              .offset = FIELD(max_model_len),
                              .help = "longest sequence, prompt and answer (default: the model's)"},
    [OPTION_MAX_NUM_SEQS] = {"max-num-seqs", NULL, 0, INTEGER, .group = GROUP_ENGINE, .min = 1,
                             .max = LIMIT_SEQS, .commands = ENGINE, .offset = FIELD(max_num_seqs),
                             .help = "sequences in one step (default 64, on a GPU 256)"},
    [OPTION_MAX_NUM_BATCHED_TOKENS] = {"max-num-batched-tokens", NULL, 0, INTEGER,
                                       .group = GROUP_ENGINE, .min = 1, .max = LIMIT_BATCHED_TOKENS,
                                       .commands = ENGINE, .offset = FIELD(max_num_batched_tokens),
                                       .help = "tokens in one step (default 512, on a GPU 2048)"},
    [OPTION_KV_CACHE_MEMORY] = {"kv-cache-memory", NULL, 0, OPTION_KIND_SIZE, GROUP_ENGINE,
                                .argument = "SIZE", .min = 1, NO_LIMIT, .commands = ENGINE,
                                .offset = FIELD(kv_cache_memory),
                                .help = "memory for keys and values: 512M, 2G (default: enough for "
                                        "the longest sequence)"},
    [OPTION_NO_PREFIX_CACHING] = {"no-prefix-caching", NULL, 0, FLAG, .group = GROUP_ENGINE,
                                  .commands = ENGINE, .offset = FIELD(no_prefix_caching),
                                  .help = "compute equal beginnings of prompts again each time"},
    [OPTION_ENFORCE_EAGER] = {"enforce-eager", NULL, 0, FLAG, .group = GROUP_ENGINE,
                              .commands = ENGINE, .offset = FIELD(enforce_eager),
                              .help = "GPU: each operation launched by itself; changes no result"},

    [OPTION_MAX_TOKENS] = {"max-tokens", "predict", 'n', INTEGER, .group = GROUP_SAMPLING, .min = 1,
                           UP_TO_I32, .commands = ANSWERING, .offset = FIELD(max_tokens),
                           .help = "longest answer (default: as long as the context takes)"},
    [OPTION_MIN_TOKENS] = {"min-tokens", NULL, 0, INTEGER, .group = GROUP_SAMPLING, UP_TO_I32,
                           .commands = ANSWERING, .offset = FIELD(min_tokens),
                           .help = "no end token before this many"},
    [OPTION_TEMPERATURE] = {"temperature", "temp", 0, NUMBER, .group = GROUP_SAMPLING,
                            .max = LIMIT_TEMPERATURE, .commands = ANSWERING,
                            .offset = FIELD(temperature),
                            .help = "0 takes the likeliest token each time (default of this and "
                                    "the next three: what the model recommends)"},
    [OPTION_TOP_P] = {"top-p", NULL, 0, NUMBER, .group = GROUP_SAMPLING, .min = LIMIT_LEAST_TOP_P,
                      .max = 1, .commands = ANSWERING, .offset = FIELD(top_p),
                      .help =
                          "the likeliest tokens that together reach this probability; 1 is off"},
    [OPTION_TOP_K] = {"top-k", NULL, 0, INTEGER, .group = GROUP_SAMPLING, UP_TO_I32,
                      .commands = ANSWERING, .offset = FIELD(top_k),
                      .help = "the N likeliest tokens; 0 is off"},
    [OPTION_MIN_P] = {"min-p", NULL, 0, NUMBER, .group = GROUP_SAMPLING, .max = 1,
                      .commands = ANSWERING, .offset = FIELD(min_p),
                      .help = "tokens at least this likely, relative to the likeliest; 0 is off"},
    [OPTION_REPETITION_PENALTY] = {"repetition-penalty", "repeat-penalty", 0, NUMBER,
                                   .group = GROUP_SAMPLING, .min = LIMIT_LEAST_REPETITION_PENALTY,
                                   .max = LIMIT_REPETITION_PENALTY, .commands = ANSWERING,
                                   .offset = FIELD(repetition_penalty),
                                   .help = "divides the logits of tokens already seen; 1 is off"},
    [OPTION_PRESENCE_PENALTY] = {"presence-penalty", NULL, 0, NUMBER, .group = GROUP_SAMPLING,
                                 .min = -LIMIT_PENALTY, .max = LIMIT_PENALTY, .commands = ANSWERING,
                                 .offset = FIELD(presence_penalty),
                                 .help = "taken from the logits of tokens already in the answer"},
    [OPTION_FREQUENCY_PENALTY] = {"frequency-penalty", NULL, 0, NUMBER, .group = GROUP_SAMPLING,
                                  .min = -LIMIT_PENALTY, .max = LIMIT_PENALTY,
                                  .commands = ANSWERING, .offset = FIELD(frequency_penalty),
                                  .help = "the same, times how often they are there"},
    [OPTION_SEED] = {"seed", NULL, 0, INTEGER, .group = GROUP_SAMPLING, NO_LIMIT,
                     .commands = ANSWERING | BENCH, .offset = FIELD(seed),
                     .help = "same seed, same answer (default: another each time)"},
    [OPTION_STOP] = {"stop", NULL, 0, OPTION_KIND_TEXTS, GROUP_SAMPLING, .argument = "S",
                     .commands = ANSWERING, .offset = FIELD(stop),
                     .help = "end the answer before this text; may be given several times"},
    [OPTION_IGNORE_EOS] = {"ignore-eos", NULL, 0, FLAG, .group = GROUP_SAMPLING,
                           .commands = ANSWERING, .offset = FIELD(ignore_eos),
                           .help = "go on after the end token, up to --max-tokens"},
    [OPTION_ANSWERS] = {"answers", NULL, 0, INTEGER, .group = GROUP_SAMPLING, .min = 1,
                        .max = LIMIT_CHOICES, .commands = RUN, .offset = FIELD(answers),
                        .help = "several answers to the one prompt (default 1)"},
    [OPTION_LOGPROBS] = {"logprobs", NULL, 0, .kind = OPTION_KIND_INTEGER, .argument = "K",
                         .group = GROUP_SAMPLING, .max = LIMIT_LOGPROBS, .commands = RUN,
                         .offset = FIELD(logprobs),
                         .help =
                             "with --json: log-probability of each token and of the K likeliest"},

    [OPTION_SYSTEM] = {"system", NULL, 0, OPTION_KIND_TEXT, GROUP_INPUT, .argument = "S",
                       .commands = ANSWERING, .offset = FIELD(system), .help = "system message"},
    [OPTION_RAW] = {"raw", NULL, 0, FLAG, .group = GROUP_INPUT, .commands = RUN,
                    .offset = FIELD(raw),
                    .help = "no chat template: the model continues the prompt as it is; control "
                            "tokens written in it count"},
    [OPTION_PROMPT_IDS] = {"prompt-ids", NULL, 0, INTEGERS, .group = GROUP_INPUT, UP_TO_I32,
                           .commands = RUN, .offset = FIELD(prompt_ids),
                           .help = "token ids as the prompt, nothing added"},
    [OPTION_FILE] = {"file", NULL, 'f', OPTION_KIND_FILE, GROUP_INPUT, .argument = "FILE",
                     .commands = RUN | TOKENIZE, .offset = FIELD(file),
                     .help = "read the text from a file; - is standard input"},
    [OPTION_SPECIAL] = {"special", NULL, 0, FLAG, .group = GROUP_INPUT, .commands = TOKENIZE,
                        .offset = FIELD(special),
                        .help = "control tokens written in the text become tokens"},
    [OPTION_DECODE] = {"decode", NULL, 0, FLAG, .group = GROUP_INPUT, .commands = TOKENIZE,
                       .offset = FIELD(decode), .help = "from ids to text"},
    [OPTION_CHAT] = {"chat", NULL, 0, FLAG, .group = GROUP_INPUT, .commands = TOKENIZE,
                     .offset = FIELD(chat),
                     .help = "the text is JSON: a list of messages, or an object with messages, "
                             "tools, add_generation_prompt, chat_template_kwargs; shows the "
                             "rendered text and its ids"},
    [OPTION_TENSORS] = {"tensors", NULL, 0, FLAG, .group = GROUP_INPUT, .commands = INSPECT,
                        .offset = FIELD(tensors), .help = "list every tensor"},
    [OPTION_OUTPUT] = {"output", NULL, 'o', OPTION_KIND_FILE, GROUP_INPUT, .argument = "FILE",
                       .commands = BATCH, .offset = FIELD(output),
                       .help = "write here, whole or not at all (default: standard output)"},
    [OPTION_BATCH] = {"batch", NULL, 0, INTEGERS, .group = GROUP_INPUT, .min = 1, .max = LIMIT_SEQS,
                      .commands = BENCH, .offset = FIELD(batch),
                      .help = "batch sizes for decoding (default 1,2,4,8,16)"},
    [OPTION_PROMPT] = {"prompt", NULL, 0, INTEGERS, .group = GROUP_INPUT, .min = 1, UP_TO_I32,
                       .commands = BENCH, .offset = FIELD(prompt),
                       .help = "prompt lengths for prefill; each batch size decodes after each "
                               "of them (default 128,512)"},
    [OPTION_GENERATED] = {"generated", NULL, 0, INTEGER, .group = GROUP_INPUT, .min = 2, UP_TO_I32,
                          .commands = BENCH, .offset = FIELD(generated),
                          .help = "tokens to decode (default 64)"},
    [OPTION_REPEAT] = {"repeat", NULL, 0, INTEGER, .group = GROUP_INPUT, .min = 1, .max = 1000,
                       .commands = BENCH, .offset = FIELD(repeat),
                       .help = "measurements of each, the median is shown (default 3)"},
    [OPTION_JSON] = {"json", NULL, 0, FLAG, .group = GROUP_INPUT,
                     .commands = RUN | BENCH | TOKENIZE | INSPECT | CHECK, .offset = FIELD(json),
                     .help = "print JSON, nothing else"},
    [OPTION_DRY_RUN] = {"dry-run", NULL, 0, FLAG, .group = GROUP_INPUT, .commands = ENGINE,
                        .offset = FIELD(dry_run),
                        .help = "print the memory plan, load and compute nothing"},

    [OPTION_QUIET] = {"quiet", NULL, 'q', FLAG, .group = GROUP_GENERAL, .commands = EVERY,
                      .offset = FIELD(quiet), .help = "no progress, no speed; errors only"},
    [OPTION_VERBOSE] = {"verbose", NULL, 'v', FLAG, .group = GROUP_GENERAL, .commands = EVERY,
                        .offset = FIELD(verbose), .help = "say more: the plan, the speed"},
    [OPTION_VERSION] = {"version", NULL, 0, FLAG, .group = GROUP_GENERAL, .commands = EVERY,
                        .offset = FIELD(version), .help = "print the version"},
    [OPTION_HELP] = {"help", NULL, 'h', FLAG, .group = GROUP_GENERAL, .commands = EVERY,
                     .offset = FIELD(help), .help = "print this help"},
};
