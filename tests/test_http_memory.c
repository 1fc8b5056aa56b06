/*
 * The memory of requests and replies: what is too much is refused, what waits for a slow reader
 * counts, and all of it comes back.
 */
#include "http_client.h"

#include <stdatomic.h>

#include "serve/server_internal.h"

static const char completions[] = "/v1/completions", tokenize[] = "/tokenize";
static const char quick[] = "{\"prompt\":[40,41],\"max_tokens\":2,\"ignore_eos\":true}";
static struct site site;
static struct answered a;

static void open_site(int64_t max_memory)
{
    struct server_options options = {.max_memory = max_memory};
    site_open(&site, "127.0.0.1", &options);
    site_load(&site, 4);
}

static size_t held(void)
{
    return atomic_load(&site.server->held_bytes);
}

/* Until all but this has come back. */
static void await_held(size_t rest)
{
    for (double end = clock_seconds() + 300; held() > rest && clock_seconds() < end;) usleep(1000);
    assert_int_equal(held(), rest);
}

static void close_site(void)
{
    assert_quiet(&site);
    await_held(0);
    site_close(&site);
}

/* n times the text, behind a beginning and before an end. */
static struct strbuf repeated(const char *begin, const char *text, int n, const char *end)
{
    struct strbuf body = {0};
    strbuf_text(&body, begin);
    for (int i = 0; i < n; i++) strbuf_text(&body, text);
    strbuf_text(&body, end);
    return body;
}

/* Once the memory of the last reply has come back, which is after its client has it. */
static void ask_body(const char *path, struct strbuf body)
{
    await_held(0);
    ask(&site, "POST", path, strbuf_cstr(&body), &a);
    strbuf_free(&body);
}

/* A reply with its prompt once for each of many choices; streamed it is one choice after the other.
 */
static void known_beforehand(void **state)
{
    (void)state;
    static const struct {
        const char *begin, *text, *end;
        int length, n;
        bool streams; /* in less */
        const char *field;
    } cases[] = {
        {"{\"prompt\":[40", ",41", "],\"return_token_ids\":true", 130, 16, true,
         "return_token_ids"},
        {"{\"prompt\":\"", "one two ", "\",\"echo\":true", 200, 16, true, "echo"},
        {"{\"debug\":true,\"prompt\":[[40],[40", ",41", "]]", 1100, 1, false, "debug"},
        {"{\"prompt\":[40", ",41", "]", 1, 40, true, "n"},
    };
    open_site(96 << 10);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (int stream = 0; stream < 2; stream++) {
            char end[128];
            snprintf(end, sizeof end, "%s,\"max_tokens\":1,\"n\":%d,\"stream\":%s}", cases[i].end,
                     cases[i].n, stream ? "true" : "false");
            ask_body(completions, repeated(cases[i].begin, cases[i].text, cases[i].length, end));
            assert_status(&a, stream && cases[i].streams ? 200 : 400);
            if (stream && cases[i].streams) continue;
            assert_holds(strbuf_cstr(&a.body), "of memory and the limit is");
            char param[64];
            snprintf(param, sizeof param, "\"param\":\"%s\"", cases[i].field);
            assert_holds(strbuf_cstr(&a.body), param);
        }
    }
    close_site();
}

/* The longest text that a token of the model has. */
static int32_t longest_token(void)
{
    linnet_model_info info;
    size_t longest = 0;
    int32_t found = 0;
    linnet_model_get_info(site.model, &info);
    for (int32_t id = 0; id < info.vocab_size; id++) {
        char *text = NULL;
        size_t n = 0;
        linnet_detokenize(site.model, &id, 1, 0, &text, &n, NULL);
        linnet_free(text);
        if (n > longest) found = id;
        if (n > longest) longest = n;
    }
    return found;
}

static void tokens_and_texts(void **state)
{
    (void)state;
    enum { N = 6000 };
    char id[16];
    open_site(64 << 10);
    snprintf(id, sizeof id, ",%d", longest_token());
    ask_body("/detokenize", repeated("{\"tokens\":[40", id, N, "]}"));
    assert_status(&a, 413);
    ask_body("/detokenize", repeated("{\"tokens\":[40", id, N / 50, "]}"));
    assert_status(&a, 200);
    ask_body(tokenize, repeated("{\"prompt\":\"", "x y z ", N, "\"}"));
    assert_status(&a, 413);
    ask_body(tokenize, repeated("{\"prompt\":\"", "x y z ", N / 50, "\"}"));
    assert_status(&a, 200);
    close_site();
}

/* A client whose system takes no more than so many bytes for it. */
static int slow_client(int small)
{
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)site.port)};
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
    assert_int_equal(connect(fd, (struct sockaddr *)&to, sizeof to), 0);
    return fd;
}

/* A finished reply counts until its client has it, or is gone. Who takes it slowly keeps others out
 * for a moment only. */
static void slow_readers(void **state)
{
    (void)state;
    enum { WORDS = 200000, MEMORY = 8 << 20 };
    struct strbuf body = repeated("{\"prompt\":\"", "x y z ", WORDS, "\"}");
    struct server_options options = {.max_memory = MEMORY, .crowded_s = 1};
    site_open(&site, "127.0.0.1", &options);
    site_load(&site, 4);
    int fds[64], n = 0;
    char begun;
    for (; n < 64; n++) { /* until there is no more room */
        size_t before = held();
        fds[n] = slow_client(2048);
        client_ask(fds[n], "POST", tokenize, "", strbuf_cstr(&body));
        char status[13] = "";
        for (size_t i = 0; i < 12; i++) assert_true(client_byte(fds[n], &status[i]));
        begun = status[9];
        if (begun == '5') break;
        assert_string_equal(status, "HTTP/1.1 200");
        assert_true(held() >= before + WORDS);
        assert_true(held() <= MEMORY);
    }
    assert_in_range(n, 1, 63);
    ask(&site, "GET", "/health", NULL, &a);
    assert_status(&a, 200);
    double end = clock_seconds() + 300;
    do ask(&site, "POST", tokenize, strbuf_cstr(&body), &a);
    while (a.status == 503 && clock_seconds() < end);
    assert_status(&a, 200); /* and none of the slow ones has hung up */
    for (int i = 0; i <= n; i++) close(fds[i]);
    strbuf_free(&body);
    close_site();
}

/* Nobody keeps a reply for ever: a client that takes something now and then, but too little, is cut
 * off. */
static void replies_have_an_end(void **state)
{
    (void)state;
    enum { WORDS = 100000 }; /* far more than is taken, and than the system keeps */
    struct server_options options = {.stall_s = 2, .reply_slowest = 1 << 20};
    site_open(&site, "127.0.0.1", &options);
    site_load(&site, 4);
    struct strbuf body = repeated("{\"prompt\":\"", "x y z ", WORDS, "\"}");
    int fd = -1;
    do { /* again where this client was late before it had sent all */
        if (fd >= 0) close(fd);
        fd = slow_client(32 << 10);
        client_ask(fd, "POST", tokenize, "", strbuf_cstr(&body));
    } while (!client_head(fd, &a));
    assert_status(&a, 200);
    size_t size = strtoul(header_of(&a, "content-length"), NULL, 10);
    char bytes[8 << 10];
    size_t n = 0;
    for (ssize_t some; (some = recv(fd, bytes, sizeof bytes, 0)) > 0; n += (size_t)some)
        usleep(60000); /* it takes something all the time */
    assert_true(n < size);
    close(fd);
    strbuf_free(&body);
    close_site();
}

/* A client that does not read its stream, of which all has been made: 1 MB with the prompts. */
static int slow_stream(void)
{
    enum { N = 64, WORDS = 1200 };
    struct strbuf body = repeated("{\"prompt\":\"", "<|endoftext|>", WORDS,
                                  "\",\"echo\":true,\"max_tokens\":1,\"n\":64,\"stream\":true}");
    int fd = slow_client(2048);
    client_ask(fd, "POST", completions, "", strbuf_cstr(&body));
    strbuf_free(&body);
    linnet_stats stats = {.generated_tokens = 0};
    for (double end = clock_seconds() + 300; clock_seconds() < end; usleep(1000)) {
        linnet_engine_get_stats(site.engine, &stats);
        if (stats.generated_tokens == N) break;
    }
    assert_int_equal(stats.generated_tokens, N);
    return fd;
}

/* Of a stream that waits for its reader, only a piece is there as text. */
static void slow_streams(void **state)
{
    (void)state;
    enum { READ = 700 << 10, MOST = 320 << 10 };
    char buffer[4096];
    open_site(0);
    int fd = slow_stream();
    for (size_t n = 0; n < READ;) {
        ssize_t got = recv(fd, buffer, sizeof buffer, 0);
        assert_true(got > 0);
        n += (size_t)got;
        assert_true(held() < MOST);
    }
    close(fd);
    close_site();
}

/* Who has stopped reading a stream is cut off once others find no room, and not before. */
static void stalled_streams(void **state)
{
    (void)state;
    enum { MEMORY = 1 << 20, OTHERS = 800 << 10, SHARING = 7 };
    struct server_options options = {.max_memory = MEMORY, .crowded_s = 1};
    site_open(&site, "127.0.0.1", &options);
    site_load(&site, 4);
    int fd = slow_stream();
    usleep(2000000); /* for longer than crowded_s it takes nothing, and nobody minds */
    assert_true(held() > 0);
    atomic_fetch_add(&site.server->held_bytes, OTHERS);
    atomic_fetch_add(&site.server->n_sharing, SHARING);
    struct strbuf large = repeated("{\"prompt\":\"", "x y z ", 10000, "\"}");
    for (double end = clock_seconds() + 300; held() > OTHERS && clock_seconds() < end;) {
        ask(&site, "POST", tokenize, strbuf_cstr(&large), &a);
        assert_status(&a, 503);
        usleep(100000);
    }
    assert_int_equal(held(), OTHERS);
    atomic_fetch_sub(&site.server->held_bytes, OTHERS);
    atomic_fetch_sub(&site.server->n_sharing, SHARING);
    strbuf_free(&large);
    close(fd);
    close_site();
}

/* An answer that grows beyond what there is ends, streamed or not. */
static void grow_too_much(size_t others, int status, const char *message)
{
    static const char body[] = "{\"prompt\":[40],\"max_tokens\":20000,\"ignore_eos\":true%s}";
    char text[256];
    struct streamed s;
    snprintf(text, sizeof text, body, "");
    ask(&site, "POST", completions, text, &a);
    assert_status(&a, status);
    assert_holds(strbuf_cstr(&a.body), message);
    await_held(others);
    snprintf(text, sizeof text, body, ",\"stream\":true");
    ask(&site, "POST", completions, text, &a);
    assert_status(&a, 200);
    streamed_read(&s, &a.body);
    assert_true(s.text[0].size > 100); /* what there was of it */
    assert_holds(json_string_value(json_object_get(s.error, "message")), message);
    assert_int_equal(s.n_done, 1);
    streamed_free(&s);
    assert_quiet(&site);
    await_held(others);
}

/* By itself it would do so again and again; beside others it may be asked for later. */
static void growing_answers(void **state)
{
    (void)state;
    enum { ALL = 32 << 10, OTHERS = 20 << 10 };
    open_site(ALL);
    grow_too_much(0, 400, "takes more than");
    ask(&site, "POST", completions,
        "{\"prompt\":[40],\"max_tokens\":100,\"ignore_eos\":true,\"logprobs\":20}", &a);
    assert_status(&a, 400); /* its log-probabilities count as they come */
    assert_holds(strbuf_cstr(&a.body), "takes more than");
    await_held(0);
    atomic_fetch_add(&site.server->held_bytes, OTHERS);
    atomic_fetch_add(&site.server->n_sharing, 3);
    grow_too_much(OTHERS, 503, "too much memory");
    atomic_fetch_sub(&site.server->held_bytes, OTHERS);
    atomic_fetch_sub(&site.server->n_sharing, 3);
    ask(&site, "POST", completions, quick, &a);
    assert_status(&a, 200);
    close_site();
}

/* Who gives way when there is too little: those with more than an equal part. */
static void equal_parts(void **state)
{
    (void)state;
    static struct server s = {.options = {.max_memory = 1000}};
    static struct exchange large = {.server = &s}, small = {.server = &s};
    assert_true(account_take(&large, &large.reply_held, 700));
    assert_true(account_take(&small, &small.reply_held, 300));
    assert_false(account_is_greedy(&large)); /* there is enough */
    assert_false(account_take(&small, &small.out_held, 1));
    assert_int_equal(atomic_load(&s.held_bytes), 1000); /* who is refused takes nothing */
    account_add(&small, &small.out_held, 100);
    assert_true(account_is_greedy(&large));
    assert_false(account_is_greedy(&small));
    account_set(&large, &large.reply_held, 100);
    assert_false(account_is_greedy(&large));
    assert_int_equal(atomic_load(&s.held_bytes), 500);
    assert_int_equal(account_part(&s), 500);
    account_add(&small, &small.body_held, 200); /* a body is in nobody's part */
    assert_int_equal(account_part(&s), 400);
    account_set(&small, &small.body_held, 0);
    account_set(&small, &small.reply_held, 0);
    account_set(&small, &small.out_held, 0);
    assert_int_equal(account_part(&s), 1000);
}

/* Answers in the order in which they were there, before new requests; the long ones first, one at a
 * time. */
static void jobs_in_order(void **state)
{
    (void)state;
    static struct server s = {.mutex = PTHREAD_MUTEX_INITIALIZER, .work = PTHREAD_COND_INITIALIZER};
    static struct exchange x[7];
    static const int expected[] = {4, 1, 3, 0, 2, 5, 6}; /* 5 and 6 when 4 is done with */
    bool is_long;
    for (int i = 0; i < 7; i++) {
        x[i].server = &s;
        pthread_mutex_init(&x[i].mutex, NULL);
        x[i].body.size = i < 4 ? 0 : LONG_BODY + 1;
        atomic_store(&x[i].stage, i < 4 && i % 2 ? STAGE_WAITING : STAGE_WORKING);
        exchange_work(&x[i]);
    }
    for (int i = 0; i < 7; i++) {
        if (i >= 5) {
            assert_null(server_take_job(&s, &is_long));
            s.long_job = false;
        }
        struct exchange *job = server_take_job(&s, &is_long);
        assert_ptr_equal(job, &x[expected[i]]);
        assert_int_equal(is_long, expected[i] >= 4);
    }
    for (int i = 0; i < 7; i++) pthread_mutex_destroy(&x[i].mutex);
}

static int done(void **state)
{
    (void)state;
    strbuf_free(&a.body);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_beforehand),    cmocka_unit_test(tokens_and_texts),
        cmocka_unit_test(slow_readers),        cmocka_unit_test(growing_answers),
        cmocka_unit_test(slow_streams),        cmocka_unit_test(equal_parts),
        cmocka_unit_test(replies_have_an_end), cmocka_unit_test(jobs_in_order),
        cmocka_unit_test(stalled_streams),
    };
    return cmocka_run_group_tests(tests, NULL, done);
}
