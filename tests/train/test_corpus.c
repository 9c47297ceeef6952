/* Corpora: packing, splitting, verifying, and windows as a pure function of seed and sample. */
#include <xxhash.h>

#include "tests/train/files.h"
#include "train/corpus.h"
#include "train/h5.h"
#include "train/sha256.h"

static void test_sha256(void **state)
{
    (void)state;
    static const struct { /* FIPS 180-4 examples */
        const char *text, *hex;
    } cases[] = {
        { "", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855" },
        { "abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad" },
        { "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
          "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1" },
    };
    char hex[MT_SHA256_HEX_BYTES];
    mt_sha256 s;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mt_sha256_begin(&s);
        mt_sha256_add(&s, cases[i].text, strlen(cases[i].text));
        mt_sha256_end(&s, hex);
        assert_string_equal(hex, cases[i].hex);
    }
    mt_sha256_begin(&s);
    char a[1000];
    memset(a, 'a', sizeof a);
    for (size_t done = 0, n; done < 1000000; done += n) {
        n = 1 + done % 997; /* pieces that do not fit blocks */
        if (n > 1000000 - done) n = 1000000 - done;
        mt_sha256_add(&s, a, n);
    }
    mt_sha256_end(&s, hex);
    assert_string_equal(hex, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

/* ---- packing -----------------------------------------------------------------------------------
 */

static mt_status pack_one(const char *input, int64_t vocab_size, const char *output)
{
    mt_corpus_pack_result result;
    const mt_corpus_pack_args args = {
        .inputs = &input, .input_count = 1, .vocab_size = vocab_size, .output = output
    };
    return mt_corpus_pack(&result, &args);
}

static void expect_tokens(const char *path, const int32_t *want, int64_t count)
{
    mt_corpus *corpus;
    assert_ok(mt_corpus_open(&corpus, path));
    assert_int_equal(mt_corpus_get_info(corpus)->tokens, count);
    int32_t *got = malloc((size_t)count * sizeof *got);
    assert_ok(mt_corpus_tokens(corpus, 0, count, got));
    assert_memory_equal(got, want, (size_t)count * sizeof *got);
    assert_fails(mt_corpus_tokens(corpus, 1, count, got), MT_EINVAL, "not within");
    free(got);
    mt_corpus_close(&corpus);
    assert_null(corpus);
}

static void test_bytes(void **state)
{
    (void)state;
    put_text(in_dir("one.txt"), "Hello, ");
    put_text(in_dir("none.txt"), "");
    put_text(in_dir("two.txt"), "world\xff");
    char sha256[MT_CORPUS_TEXT];
    const char *const inputs[3] = { in_dir("one.txt"), in_dir("none.txt"), in_dir("two.txt") };
    mt_corpus_pack_result result;
    mt_corpus_pack_args args = { .inputs = inputs, .input_count = 3, .output = in_dir("c.h5") };
    assert_ok(mt_corpus_pack(&result, &args));
    assert_int_equal(result.tokens, 13);
    assert_int_equal(result.valid_tokens, 0);
    mt_corpus *corpus;
    assert_ok(mt_corpus_open(&corpus, args.output));
    const mt_corpus_info *info = mt_corpus_get_info(corpus);
    assert_int_equal(info->dtype, MT_U8);
    assert_int_equal(info->vocab_size, 256);
    assert_int_equal(info->largest, 255);
    assert_int_equal(info->documents, 2);
    assert_string_equal(info->tokenizer, "bytes");
    assert_string_equal(info->split, "all");
    assert_string_equal(info->sha256, result.sha256); /* printf 'Hello, world\xff' | sha256sum */
    assert_string_equal(info->sha256,
                        "a0b54dbed7b458bfdf01ee8fbb8a6a0903e6bc051c850a19b3de2dfa6aaace86");
    mt_h5 *file;
    int64_t begins, one = 1;
    assert_ok(mt_h5_open(&file, args.output));
    assert_ok(mt_h5_read_slab(file, "/doc_offsets", MT_I64, &one, &one, &begins));
    assert_int_equal(begins, 7);
    mt_h5_close(&file);
    assert_ok(mt_corpus_check_vocab(corpus, 256));
    assert_fails(mt_corpus_check_vocab(corpus, 255), MT_ECONFIG, "token 255");
    mt_corpus_close(&corpus);
    args.sha256 = strcpy(sha256, result.sha256);
    sha256[strcspn(sha256, "abcdef")] -= 'a' - 'A'; /* both cases */
    assert_ok(mt_corpus_pack(&result, &args));
    memset(sha256, '0', 64);
    assert_fails(mt_corpus_pack(&result, &args), MT_EDAMAGED, "must be 0000");
}

/* Sizes around the piece that is hashed, in every token type. */
static void test_sizes(void **state)
{
    (void)state;
    static const struct {
        int64_t vocab;
        int bytes;
    } types[] = {
        { 200, 2 }, { 256, 2 }, { 257, 2 }, { 65536, 2 }, { 65537, 4 }, { INT32_MAX, 4 }
    };
    for (size_t t = 0; t < sizeof types / sizeof *types; t++) {
        int64_t size = types[t].vocab <= 256 ? 1 : types[t].vocab <= 65536 ? 2 : 4;
        int64_t piece = (1 << 20) / size;
        const int64_t counts[] = { 1, 7, piece - 1, piece, piece + 1 };
        for (size_t k = 0; k < sizeof counts / sizeof *counts; k++) {
            int64_t n = counts[k];
            unsigned char *raw = malloc((size_t)(n * types[t].bytes));
            int32_t *want = malloc((size_t)n * sizeof *want);
            for (int64_t i = 0; i < n; i++) {
                want[i] =
                    (int32_t)mt_rng_below(1, (uint32_t)t, (uint64_t)i, (uint64_t)types[t].vocab);
                if (i == n / 2) want[i] = (int32_t)(types[t].vocab - 1);
                for (int b = 0; b < types[t].bytes; b++)
                    raw[i * types[t].bytes + b] = (unsigned char)(want[i] >> (8 * b));
            }
            put_file(in_dir("t.bin"), raw, (size_t)(n * types[t].bytes));
            assert_ok(pack_one(in_dir("t.bin"), types[t].vocab, in_dir("t.h5")));
            expect_tokens(in_dir("t.h5"), want, n);
            if (types[t].vocab != 65537) /* one less would be a file of u16 */
                assert_fails(pack_one(in_dir("t.bin"), types[t].vocab - 1, in_dir("no.h5")),
                             MT_EDAMAGED, "token");
            assert_false(mt_path_exists(in_dir("no.h5")));
            free(raw);
            free(want);
        }
    }
}

static void put_npy(const char *path, int version, const char *dictionary, const void *data,
                    size_t bytes)
{
    unsigned char file[4096] = "\x93NUMPY";
    size_t n = strlen(dictionary), start = version == 1 ? 10 : 12;
    file[6] = (unsigned char)version;
    file[8] = (unsigned char)n;
    memcpy(file + start, dictionary, n);
    memcpy(file + start + n, data, bytes);
    put_file(path, file, start + n + bytes);
}

static void test_npy(void **state)
{
    (void)state;
    const uint16_t u16[4] = { 5, 6, 700, 8 };
    const int64_t i64[3] = { 1, 2, 99 }, negative[2] = { 3, -7 };
    const int32_t want_u16[4] = { 5, 6, 700, 8 }, want_i64[3] = { 1, 2, 99 };
    const char *path = in_dir("a.npy"), *out = in_dir("a.h5");
    put_npy(path, 1, "{'descr': '<u2', 'fortran_order': False, 'shape': (4,), }  \n", u16, 8);
    assert_ok(pack_one(path, 1000, out));
    expect_tokens(out, want_u16, 4);
    put_npy(path, 2, "{'descr': '<i8', 'fortran_order': False, 'shape': (3,), }", i64, 24);
    assert_ok(pack_one(path, 100, out));
    expect_tokens(out, want_i64, 3);
    mt_corpus_info info; /* a token of one byte is not a byte of text */
    put_npy(path, 1, "{'descr': '|u1', 'shape': (8,), }", u16, 8);
    assert_ok(pack_one(path, 256, out));
    assert_ok(mt_corpus_read_info(&info, out));
    assert_false(mt_corpus_of_bytes(&info));
    static const struct { /* first five of kinds that are not taken */
        const char *dictionary, *words;
    } b[] = {
        { "{'descr': '<f4', 'shape': (2,), }", "elements '<f4' are not little-endian integers" },
        { "{'descr': '>u2', 'shape': (2,), }", "little-endian integers" },
        { "{'descr': '<u3', 'shape': (2,), }", "little-endian integers" },
        { "{'descr': '<u2', 'shape': (2, 2), }", "shape '(2, 2)' is not of one dimension" },
        { "{'descr': '<u2', 'shape': (), }", "one dimension" },
        { "{'shape': (2,), }", "little-endian integers" },
        { "{'descr': '<u2'}", "one dimension" },
        { "{'descr': '<u2', 'shape': (9,), }", "only 16 bytes" },
        { "{'descr': '<u2', 'shape': (9223372036854775807,), }", "only 16 bytes" },
        { "{'descr': '|i1', 'shape': (9,), }", "token -7 at position 8" },
        { "{'descr': '<i8', 'shape': (2,), }", "token -7 at position 1" },
        { "{'descr': '<u8', 'shape': (2,), }", "token 18446744073709551609 at position 1" },
    };
    for (size_t i = 0; i < sizeof b / sizeof *b; i++) {
        put_npy(path, 1, b[i].dictionary, negative, 16);
        assert_fails(pack_one(path, 1000, out), i < 5 ? MT_EUNSUPPORTED : MT_EDAMAGED, b[i].words);
    }
    put_text(path, "\x93NUMPY\x01");
    assert_fails(pack_one(path, 1000, out), MT_EDAMAGED, "not a NumPy");
    put_file(path, "\x93NUMPY\x01\0\xff\xff..", 12);
    assert_fails(pack_one(path, 1000, out), MT_EDAMAGED, "NumPy header of 65535 bytes");
}

static void test_bad_arguments(void **state)
{
    (void)state;
    const char *const inputs[2] = { in_dir("x.bin"), in_dir("absent") };
    const char *out = in_dir("x.h5");
    mt_corpus_pack_result r;
    put_file(inputs[0], "\1\0\2\0\3", 5);
    assert_fails(pack_one(inputs[0], 0, out), MT_ECONFIG, "holds tokens: how many there are");
    assert_fails(pack_one(inputs[0], 9, out), MT_EDAMAGED, "5 bytes, not a multiple of the 2");
    put_file(inputs[0], "\1\0\2\0\3\1", 6);
    assert_fails(pack_one(inputs[0], 9, out), MT_EDAMAGED, "token 259 at position 2");
    put_file(inputs[0], "", 0);
    assert_fails(pack_one(inputs[0], 9, out), MT_ECONFIG, "no tokens");
    assert_fails(pack_one(inputs[1], 9, out), MT_EIO, "absent");
    assert_fails(pack_one(inputs[0], -1, out), MT_ECONFIG, "vocab_size -1");
    assert_false(mt_path_exists(out));
    mt_corpus_pack_args args = { .inputs = inputs, .input_count = 1, .output = out };
    args.input = MT_INPUT_BYTES;
    args.split = "tail:2";
    assert_fails(mt_corpus_pack(&r, &args), MT_ECONFIG, "needs a file");
    args.valid_output = out;
    assert_fails(mt_corpus_pack(&r, &args), MT_ECONFIG, "cannot both go");
    char other_name[300];
    snprintf(other_name, sizeof other_name, "%s/./x.h5", files_dir);
    put_text(inputs[0], "four");
    args.valid_output = other_name;
    assert_fails(mt_corpus_pack(&r, &args), MT_ECONFIG, "cannot both go");
    args.output = inputs[0], args.valid_output = out;
    assert_fails(mt_corpus_pack(&r, &args), MT_ECONFIG, "the result needs another name");
    args.output = out, args.valid_output = inputs[0];
    assert_fails(mt_corpus_pack(&r, &args), MT_ECONFIG, "the result needs another name");
    args.split = NULL, args.valid_output = in_dir("y.h5");
    assert_fails(mt_corpus_pack(&r, &args), MT_ECONFIG, "needs a split rule");
    static const char *const rules[] = {
        "tail", "tail:1", "tail:x", "tail:", "half", "tails:3", ""
    };
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        args.split = rules[i];
        assert_fails(mt_corpus_pack(&r, &args), MT_ECONFIG, "split");
    }
    args.input_count = 0;
    assert_fails(mt_corpus_pack(&r, &args), MT_ECONFIG, "no files");
    mt_corpus_input input;
    assert_ok(mt_corpus_input_parse(&input, "npy"));
    assert_int_equal(input, MT_INPUT_NPY);
    assert_fails(mt_corpus_input_parse(&input, "csv"), MT_ECONFIG, "'csv'");
}

/* ---- splitting ---------------------------------------------------------------------------------
 */

/* Packs text files by a rule and compares both corpora with what they must hold, as text. */
static void expect_split(const char *const *texts, int count, const char *rule, const char *train,
                         const char *valid, int64_t train_documents, int64_t valid_documents)
{
    static char names[8][300];
    const char *inputs[8];
    mt_corpus_pack_result r;
    for (int i = 0; i < count; i++) {
        snprintf(names[i], sizeof names[i], "%s/in%d.txt", files_dir, i);
        put_text(names[i], texts[i]);
        inputs[i] = names[i];
    }
    const char *out[2] = { in_dir("train.h5"), in_dir("valid.h5") }, *want[2] = { train, valid };
    const int64_t documents[2] = { train_documents, valid_documents };
    const mt_corpus_pack_args args = { .inputs = inputs,
                                       .input_count = count,
                                       .output = out[0],
                                       .valid_output = out[1],
                                       .split = rule };
    assert_ok(mt_corpus_pack(&r, &args));
    assert_int_equal(r.tokens, strlen(train));
    assert_int_equal(r.valid_tokens, strlen(valid));
    for (int k = 0; k < 2; k++) {
        int32_t tokens[256];
        mt_corpus *corpus;
        assert_ok(mt_corpus_open(&corpus, out[k]));
        const mt_corpus_info *info = mt_corpus_get_info(corpus);
        assert_int_equal(info->documents, documents[k]);
        assert_non_null(strstr(info->split, k ? " valid" : " train"));
        assert_ok(mt_corpus_tokens(corpus, 0, info->tokens, tokens));
        for (int64_t i = 0; i < info->tokens; i++) assert_int_equal(tokens[i], want[k][i]);
        mt_corpus_close(&corpus);
    }
}

static void test_splits(void **state)
{
    (void)state;
    static const char *const texts[] = { "aaaa", "bb", "ccc", "d", "eeeee" };
    expect_split(texts, 5, "documents:2", "aaaaccceeeee", "bbd", 3, 2);
    expect_split(texts, 5, "tail:2", "aabccdeee", "aabcee", 5, 4);
    static const char *const verses[] = {
        "Gen1:1 one\nGen1:2 two\nGen2:1 three\n1Sam2:7 four\n1Sam3:1 five\n"
        "Rev3:1 six\nRev4:1 seven\nAbc4:1 last"
    };
    /* chapters: Gen1 = 1, Gen2 = 2, 1Sam2 = 3, 1Sam3 = 4, Rev3 = 5, Rev4 = 6, Abc4 = 7 */
    expect_split(verses, 1, "kjv:2", "Gen1:1 one\nGen1:2 two\n1Sam2:7 four\nAbc4:1 last",
                 "Gen2:1 three\n1Sam3:1 five\nRev3:1 six\nRev4:1 seven\n", 3, 2);
    static const char *const bad[] = { "Gen1:1 one\nThe end\n",
                                       "Gen1:1 one\n\nGen1:2 two\n",
                                       "Gen1 one\n",
                                       "Gen:1 one\n",
                                       "Gen1:x one\n",
                                       "12Gen1:1 one\n",
                                       "Gen1:1one\n",
                                       "Gen1234567890:1 one\n" };
    mt_corpus_pack_result r;
    const char *input = in_dir("bad.txt");
    const mt_corpus_pack_args args = { .inputs = &input,
                                       .input_count = 1,
                                       .output = in_dir("bt.h5"),
                                       .valid_output = in_dir("bv.h5"),
                                       .split = "kjv" };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        put_text(input, bad[i]);
        assert_fails(mt_corpus_pack(&r, &args), MT_EDAMAGED, "is not a verse");
    }
}

/* The text of the demo, where Debian's package is installed. */
static void test_king_james(void **state)
{
    (void)state;
    char command[400];
    snprintf(command, sizeof command, "bible -f Gen1:1-Rev22:21 > %s 2>/dev/null",
             in_dir("kjv.txt"));
    if (system(command)) skip();
    const char *input = in_dir("kjv.txt");
    mt_corpus_pack_result r;
    const mt_corpus_pack_args args = {
        .inputs = &input,
        .input_count = 1,
        .output = in_dir("kt.h5"),
        .valid_output = in_dir("kv.h5"),
        .split = "kjv",
        .sha256 = "cd45f0c9cedab8e4439bd6486c8952c77cc8b0ecc5d1f6ae3513f2039f47229d"
    };
    assert_ok(mt_corpus_pack(&r, &args));
    assert_int_equal(r.tokens, 4126568);
    assert_int_equal(r.valid_tokens, 277844);
}

/* ---- windows -----------------------------------------------------------------------------------
 */

/* A corpus of n tokens with token i = i, so that a window shows where it begins. */
static mt_corpus *open_counting(int64_t n)
{
    uint32_t *raw = malloc((size_t)n * sizeof *raw);
    for (int64_t i = 0; i < n; i++) raw[i] = (uint32_t)i;
    put_file(in_dir("count.bin"), raw, (size_t)n * sizeof *raw);
    free(raw);
    const char *input = in_dir("count.bin");
    mt_corpus_pack_result r;
    const mt_corpus_pack_args args = { .inputs = &input,
                                       .input_count = 1,
                                       .input = MT_INPUT_U32,
                                       .vocab_size = n,
                                       .output = in_dir("count.h5") };
    assert_ok(mt_corpus_pack(&r, &args));
    mt_corpus *corpus;
    assert_ok(mt_corpus_open(&corpus, in_dir("count.h5")));
    return corpus;
}

/* Every epoch of every small corpus: each window once, all at stride S from one phase, targets
 * shifted by one. */
static void test_epochs(void **state)
{
    (void)state;
    static const int64_t sizes[] = { 5, 6, 8, 9, 10, 12, 13, 33, 101, 1000 };
    enum { S = 4, EPOCHS = 5 };
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        mt_corpus *c = open_counting(sizes[k]);
        int64_t windows = mt_corpus_windows_per_epoch(c, S);
        assert_true(windows >= 1 && windows <= mt_corpus_windows(c, S));
        for (int64_t e = 0; e < EPOCHS; e++) {
            char seen[1000] = { 0 };
            int64_t phase = -1;
            for (int64_t w = 0; w < windows; w++) {
                int32_t tokens[S], targets[S];
                assert_ok(mt_corpus_batch(c, 11, e * windows + w, 1, S, tokens, targets));
                for (int i = 0; i < S; i++) {
                    assert_int_equal(tokens[i], tokens[0] + i);
                    assert_int_equal(targets[i], tokens[0] + i + 1);
                }
                assert_true(targets[S - 1] < sizes[k]);
                if (phase < 0) phase = tokens[0] % S;
                assert_int_equal(tokens[0] % S, phase);
                assert_int_equal(seen[tokens[0] / S]++, 0);
            }
        }
        mt_corpus_close(&c);
    }
}

/* A batch is the same whenever it is asked for, and the same samples in batches of any size. */
static void test_batches(void **state)
{
    (void)state;
    enum { S = 16, STEPS = 40, BATCH = 8 };
    mt_corpus *c = open_counting(1500);
    static int32_t all[STEPS * BATCH * S], all_targets[STEPS * BATCH * S];
    int32_t tokens[4 * BATCH * S], targets[4 * BATCH * S];
    for (int64_t s = 0; s < STEPS; s++)
        assert_ok(mt_corpus_batch(c, 3, s * BATCH, BATCH, S, all + s * BATCH * S,
                                  all_targets + s * BATCH * S));
    for (int64_t s = STEPS - 1; s >= 0; s -= 7) {
        assert_ok(mt_corpus_batch(c, 3, s * BATCH, BATCH, S, tokens, targets));
        assert_memory_equal(tokens, all + s * BATCH * S, BATCH * S * sizeof *tokens);
        assert_memory_equal(targets, all_targets + s * BATCH * S, BATCH * S * sizeof *tokens);
    }
    assert_ok(mt_corpus_batch(c, 3, 3, 4 * BATCH, S, tokens, targets));
    assert_memory_equal(tokens, all + 3 * S, sizeof tokens);
    assert_ok(mt_corpus_batch(c, 4, 0, BATCH, S, tokens, targets));
    assert_true(memcmp(tokens, all, BATCH * S * sizeof *tokens) != 0);
    assert_ok(mt_corpus_batch(c, 3, 0, 0, S, NULL, NULL));
    assert_fails(mt_corpus_batch(c, 3, -1, 1, S, tokens, targets), MT_EINVAL, "from sample -1");
    assert_fails(mt_corpus_batch(c, 3, INT64_MAX, 2, S, tokens, targets), MT_EINVAL, "2 samples");
    assert_fails(mt_corpus_batch(c, 3, 0, 1, 0, tokens, targets), MT_EINVAL, "not positive");
    assert_fails(mt_corpus_batch(c, 3, 0, 1, 1500, tokens, targets), MT_ECONFIG, "1500 tokens");
    mt_corpus_close(&c);
}

/* The order within an epoch looks shuffled: neighbours in time are no neighbours in the text, and
 * epochs differ. */
static void test_shuffled(void **state)
{
    (void)state;
    enum { S = 4 };
    mt_corpus *c = open_counting(40001);
    int64_t windows = mt_corpus_windows_per_epoch(c, S), neighbours = 0, same = 0, phases = 0;
    int32_t tokens[S], targets[S], before = -1, first_phase = -1;
    for (int64_t w = 0; w < windows; w++) {
        assert_ok(mt_corpus_batch(c, 5, w, 1, S, tokens, targets));
        neighbours += tokens[0] == before + S;
        before = tokens[0];
        int32_t again;
        assert_ok(mt_corpus_batch(c, 5, w + windows, 1, S, tokens, targets));
        again = tokens[0];
        same += again / S == before / S;
    }
    for (int64_t e = 0; e < 64; e++) {
        assert_ok(mt_corpus_batch(c, 5, e * windows, 1, S, tokens, targets));
        if (first_phase < 0) first_phase = tokens[0] % S;
        phases += tokens[0] % S != first_phase;
    }
    /* both counts are about Poisson(1) for a random order: above 12 has a probability below 1e-9 */
    assert_true(neighbours <= 12);
    assert_true(same <= 12);
    assert_true(phases > 16); /* mean 48 of 64 */
    mt_corpus_close(&c);
}

static void test_windows(void **state)
{
    (void)state;
    mt_corpus *c = open_counting(100);
    int32_t tokens[99], targets[99];
    assert_int_equal(mt_corpus_windows(c, 33), 3);
    assert_int_equal(mt_corpus_windows(c, 34), 2);
    assert_int_equal(mt_corpus_windows(c, 99), 1);
    assert_int_equal(mt_corpus_windows(c, 100), 0);
    assert_int_equal(mt_corpus_windows(c, 0), 0);
    assert_ok(mt_corpus_window(c, 33, 2, tokens, targets));
    assert_int_equal(tokens[0], 66);
    assert_int_equal(targets[32], 99);
    assert_fails(mt_corpus_window(c, 33, 3, tokens, targets), MT_EINVAL, "3 windows");
    assert_fails(mt_corpus_window(c, 33, -1, tokens, targets), MT_EINVAL, "3 windows");
    assert_fails(mt_corpus_window(c, 100, 0, tokens, targets), MT_ECONFIG, "fewer than one window");
    mt_corpus_close(&c);
}

/* ---- damage and lies ---------------------------------------------------------------------------
 */

static void test_damage(void **state)
{
    (void)state;
    enum { N = 3000, FLIPS = 2000 };
    unsigned char raw[N];
    int32_t want[N], got[N];
    size_t bytes;
    mt_corpus *c;
    for (int i = 0; i < N; i++)
        want[i] = raw[i] = (unsigned char)(mt_rng_u32(2, 2, (uint64_t)i) % 100);
    put_file(in_dir("d.txt"), raw, N);
    assert_ok(pack_one(in_dir("d.txt"), 0, in_dir("d.h5")));
    char *text = get_file(in_dir("d.h5"), &bytes);
    for (uint64_t i = 0; i < FLIPS; i++) {
        size_t at = mt_rng_below(4, 1, i, bytes);
        char bit = (char)(1 << mt_rng_below(4, 2, i, 8));
        text[at] ^= bit;
        put_file(in_dir("f.h5"), text, bytes);
        text[at] ^= bit;
        if (mt_corpus_open(&c, in_dir("f.h5")) != MT_OK) {
            assert_null(c);
            continue;
        }
        assert_int_equal(mt_corpus_get_info(c)->tokens, N);
        assert_int_equal(mt_corpus_get_info(c)->vocab_size, 256);
        assert_string_equal(mt_corpus_get_info(c)->split, "all");
        assert_ok(mt_corpus_tokens(c, 0, N, got));
        assert_memory_equal(got, want, sizeof got);
        mt_corpus_close(&c);
    }
    for (size_t n = 0; n < bytes; n += n < 600 ? 13 : 301) {
        put_file(in_dir("f.h5"), text, n);
        assert_int_equal(mt_corpus_open(&c, in_dir("f.h5")), n ? MT_EDAMAGED : MT_EIO); /* empty */
    }
    free(text);
}

/* A corpus of four tokens, right but for what a case changes. */
typedef struct lie {
    const char *words;
    int type;
    mt_h5_storage storage;
    int64_t hashes, offsets, vocab, version;
    int64_t offset_values[5];
    uint64_t hash_error;
} lie;

static const uint16_t lie_tokens[4] = { 1, 2, 3, 40 };

static void write_lie(const char *path, const lie *l)
{
    mt_h5 *file;
    const int64_t count = 8 / (int64_t)(l->type == MT_F64 ? 8 : mt_dtype_size((mt_dtype)l->type));
    const uint64_t hash[2] = { XXH3_64bits(lie_tokens, sizeof lie_tokens) ^ l->hash_error, 0 };
    assert_ok(mt_h5_create(&file, path));
    assert_ok(mt_h5_dataset_create(file, "/tokens", l->type, 1, &count, l->storage));
    assert_ok(mt_h5_write_slab(file, "/tokens", NULL, NULL, lie_tokens));
    assert_ok(mt_h5_write(file, "/tokens_xxh3", MT_H5_U64, 1, &l->hashes, hash));
    assert_ok(mt_h5_write(file, "/doc_offsets", MT_I64, 1, &l->offsets, l->offset_values));
    assert_ok(mt_h5_set_i64(file, "/", "format_version", l->version));
    assert_ok(mt_h5_set_i64(file, "/", "vocab_size", l->vocab));
    assert_ok(mt_h5_set_string(file, "/", "tokenizer", "t"));
    assert_ok(mt_h5_set_string(file, "/", "source_sha256", "s"));
    assert_ok(mt_h5_set_string(file, "/", "split", "all"));
    assert_ok(mt_h5_commit(&file));
}

static void test_lies(void **state)
{
    (void)state;
#define GOOD                                                                                       \
    .type = MT_U16, .storage = MT_H5_CONTIGUOUS, .hashes = 1, .offsets = 3, .vocab = 41,           \
    .version = 1
    const lie good = { NULL, GOOD, .offset_values = { 0, 2, 4 } };
    mt_corpus *c;
    write_lie(in_dir("lie.h5"), &good);
    assert_ok(mt_corpus_open(&c, in_dir("lie.h5")));
    mt_corpus_close(&c);
    lie bad[] = {
        { "token 40 at position 3 is not below vocab_size 40", GOOD, .offset_values = { 0, 2, 4 } },
        { "vocab_size 0", GOOD, .offset_values = { 0, 2, 4 } },
        { "vocab_size 2147483648", GOOD, .offset_values = { 0, 2, 4 } },
        { "format_version 2", GOOD, .offset_values = { 0, 2, 4 } },
        { "do not match their checksum", GOOD, .offset_values = { 0, 2, 4 }, .hash_error = 1 },
        { "u64[2], must be u64[1]", GOOD, .offset_values = { 0, 2, 4 } },
        { "runs from 1 to 4", GOOD, .offset_values = { 1, 2, 4 } },
        { "runs from 0 to 5", GOOD, .offset_values = { 0, 2, 5 } },
        { "[1] = 2 is not below", GOOD, .offset_values = { 0, 2, 2, 4 } },
        { "not below the next, -9223372036854775807", GOOD,
          .offset_values = { 0, -INT64_MAX, -INT64_MAX, 4 } },
        { "has 1 entries", GOOD, .offset_values = { 0 } },
        { "contiguous, little-endian u8, u16 or u32", GOOD, .offset_values = { 0, 2, 4 } },
        { "contiguous, little-endian u8, u16 or u32", GOOD, .offset_values = { 0, 2, 4 } },
    };
#undef GOOD
    bad[0].vocab = 40, bad[1].vocab = 0, bad[2].vocab = (int64_t)1 << 31, bad[3].version = 2;
    bad[5].hashes = 2, bad[8].offsets = bad[9].offsets = 4, bad[10].offsets = 1;
    bad[11].type = MT_I32, bad[12].storage = MT_H5_CHECKED;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        write_lie(in_dir("lie.h5"), &bad[i]);
        assert_fails(mt_corpus_open(&c, in_dir("lie.h5")), MT_EDAMAGED, bad[i].words);
        assert_null(c);
    }
    mt_h5 *file;
    assert_ok(mt_h5_create(&file, in_dir("lie.h5")));
    assert_ok(mt_h5_commit(&file));
    assert_fails(mt_corpus_open(&c, in_dir("lie.h5")), MT_EIO, "HDF5 file, not a corpus");
    assert_fails(mt_corpus_open(&c, in_dir("absent.h5")), MT_EIO, "absent.h5");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sha256),        cmocka_unit_test(test_bytes),
        cmocka_unit_test(test_sizes),         cmocka_unit_test(test_npy),
        cmocka_unit_test(test_bad_arguments), cmocka_unit_test(test_splits),
        cmocka_unit_test(test_king_james),    cmocka_unit_test(test_epochs),
        cmocka_unit_test(test_batches),       cmocka_unit_test(test_shuffled),
        cmocka_unit_test(test_windows),       cmocka_unit_test(test_damage),
        cmocka_unit_test(test_lies),
    };
    return cmocka_run_group_tests(tests, files_setup, files_teardown);
}
