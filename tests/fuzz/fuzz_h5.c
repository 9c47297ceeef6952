/* Fuzzes the loaders of corpora and checkpoints with well-formed HDF5 files of hostile contents.
 *
 * A template lists every object of a small, right file. The input is a stream of choices: a zero,
 * or its end, writes the next object as it should be; anything else leaves it out or draws its
 * type, shape, storage and bytes from the stream. So an empty input is a file that must load, and
 * each byte is one lie. The first byte chooses corpus or checkpoint. The files are written with the
 * HDF5 library itself. */
#include <hdf5.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "train/checkpoint.h"
#include "train/corpus.h"
#include "train/fileio.h"

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size);
const char *__lsan_default_suppressions(void);

/* libhdf5 itself leaks a little when it refuses damaged structure. */
const char *__lsan_default_suppressions(void)
{
    return "leak:libhdf5\n";
}

typedef struct stream {
    const unsigned char *at, *end;
} stream;

static unsigned next(stream *s)
{
    return s->at < s->end ? *s->at++ : 0;
}

/* Mostly small, sometimes enormous. */
static hsize_t next_extent(stream *s)
{
    unsigned x = next(s);
    return x < 200 ? x % 20 : (hsize_t)1 << (x - 200);
}

typedef struct object {
    const char *path;      /* of a dataset, or of the object that has the attribute */
    const char *attribute; /* NULL: a dataset */
    int type;              /* index in the table of types */
    int ndim;
    hsize_t dims[2];
    const void *data; /* a string: NUL-terminated */
    bool contiguous;
} object;

enum { STRING, U8, U16, U32, U64, I32, I64, F32, F64, OTHERS };

/* Table of types, the first of which the templates use; closed by the caller. */
static hid_t make_type(unsigned which, size_t string_bytes)
{
    const hid_t types[] = {
        [STRING] = H5T_C_S1,   [U8] = H5T_STD_U8LE,    [U16] = H5T_STD_U16LE,
        [U32] = H5T_STD_U32LE, [U64] = H5T_STD_U64LE,  [I32] = H5T_STD_I32LE,
        [I64] = H5T_STD_I64LE, [F32] = H5T_IEEE_F32LE, [F64] = H5T_IEEE_F64LE,
        [OTHERS] = H5T_C_S1,   H5T_STD_I8LE,           H5T_STD_I16BE,
        H5T_STD_U32BE,         H5T_IEEE_F64BE,         H5T_STD_B32LE,
        H5T_STD_REF_OBJ,       H5T_UNIX_D32LE,         H5T_NATIVE_LDOUBLE,
        H5T_STD_I64BE,         H5T_STD_U16BE,
    };
    which %= sizeof types / sizeof *types;
    hid_t id = H5Tcopy(types[which]);
    if (which == STRING) H5Tset_size(id, string_bytes ? string_bytes : 1);
    if (which == OTHERS) H5Tset_size(id, H5T_VARIABLE);
    if (which != OTHERS + 4) return id;
    H5Tclose(id);
    id = H5Tcreate(H5T_COMPOUND, 12);
    H5Tinsert(id, "a", 0, H5T_STD_I64LE);
    H5Tinsert(id, "b", 8, H5T_IEEE_F32LE);
    return id;
}

static hid_t make_storage(unsigned which, int ndim, const hsize_t *dims, stream *s)
{
    hid_t list = H5Pcreate(H5P_DATASET_CREATE);
    hsize_t chunk[4];
    for (int i = 0; i < ndim; i++) chunk[i] = dims[i] && dims[i] < 1000 ? dims[i] : 7;
    if (which >= 2 && which < 7 && ndim) H5Pset_chunk(list, ndim, chunk);
    switch (which) {
    case 0: H5Pset_alloc_time(list, H5D_ALLOC_TIME_EARLY); break;
    case 1: H5Pset_layout(list, H5D_COMPACT); break;
    case 3: H5Pset_fletcher32(list); break;
    case 4: H5Pset_deflate(list, next(s) % 10); break;
    case 5: H5Pset_shuffle(list); break;
    case 6: H5Pset_nbit(list); break;
    case 7: H5Pset_external(list, "/etc/hostname", 0, H5F_UNLIMITED); break;
    }
    return list;
}

static hid_t make_space(int ndim, const hsize_t *dims)
{
    return ndim < 0 ? H5Screate(H5S_NULL)
           : ndim   ? H5Screate_simple(ndim, dims, NULL)
                    : H5Screate(H5S_SCALAR);
}

static void make_groups(hid_t file, const char *path)
{
    char part[256];
    for (const char *p = strchr(path + 1, '/'); p; p = strchr(p + 1, '/')) {
        snprintf(part, sizeof part, "%.*s", (int)(p - path), path);
        if (H5Lexists(file, part, H5P_DEFAULT) <= 0)
            H5Gclose(H5Gcreate2(file, part, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
    }
}

/* Bytes for an element buffer: the template's, with some replaced from the stream. */
static unsigned char *make_bytes(const object *o, size_t room, bool altered, stream *s)
{
    unsigned char *bytes = calloc(1, room + 1);
    if (!bytes) abort();
    size_t have = o->type == STRING
                      ? strlen(o->data)
                      : (size_t)(o->ndim > 0 ? o->dims[0] * (o->ndim > 1 ? o->dims[1] : 1) : 1) * 8;
    static const int width[] = { 1, 1, 2, 4, 8, 4, 8, 4, 8 };
    if (o->type != STRING) have = have / 8 * (size_t)width[o->type];
    memcpy(bytes, o->data, have < room ? have : room);
    for (unsigned n = altered ? next(s) % 16 : 0; n && room; n--) {
        size_t at = (next(s) + 256 * (size_t)next(s)) % room;
        bytes[at] = (unsigned char)next(s);
    }
    return bytes;
}

/* `bytes` NULL: a variable-length string, or more than is worth writing. */
static void write_attribute(hid_t file, const object *o, hid_t type, hid_t space, const void *bytes)
{
    const char *variable = "variable";
    bool is_variable = H5Tis_variable_str(type) > 0 && H5Sget_simple_extent_npoints(space) == 1;
    if (!bytes && !is_variable) return; /* an attribute cannot be declared without being stored */
    hid_t id = H5Acreate_by_name(file, o->path, o->attribute, type, space, H5P_DEFAULT, H5P_DEFAULT,
                                 H5P_DEFAULT);
    if (id < 0) return;
    H5Awrite(id, type, bytes ? bytes : (const void *)&variable);
    H5Aclose(id);
}

static void write_dataset(hid_t file, const object *o, hid_t type, hid_t space, hid_t list,
                          const void *bytes)
{
    hid_t id = H5Dcreate2(file, o->path, type, space, H5P_DEFAULT, list, H5P_DEFAULT);
    if (id < 0) return;
    if (bytes) H5Dwrite(id, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, bytes);
    H5Dclose(id);
}

static void write_object(hid_t file, const object *o, stream *s)
{
    enum {
        MAX_BYTES = 1 << 16,
        LEAVE_OUT = 1,
        TYPE = 2,
        NDIM = 4,
        SHAPE = 8,
        STORAGE = 16,
        BYTES = 32,
        SOFT_LINK = 64
    };
    unsigned lie = next(s);
    if (lie == LEAVE_OUT) return;
    int ndim = o->ndim;
    unsigned which = (unsigned)o->type, storage = o->contiguous ? 0 : 3;
    hsize_t dims[4] = { o->dims[0], o->dims[1], 1, 1 };
    if (lie & TYPE) which = next(s);
    if (lie & NDIM) ndim = (int)(next(s) % 6) - 1;
    for (int i = 0; lie & SHAPE && i < ndim; i++) dims[i] = next_extent(s);
    if (lie & STORAGE) storage = next(s) % 8;
    if (ndim <= 0 && storage > 1) storage = 0;
    hid_t type = make_type(which, o->type == STRING ? strlen(o->data) + 1 : 0);
    hid_t space = make_space(ndim, dims),
          list = make_storage(storage, ndim < 0 ? 0 : ndim, dims, s);
    hssize_t count = H5Sget_simple_extent_npoints(space);
    size_t size = H5Tget_size(type);
    bool small = count >= 0 && count < MAX_BYTES && (size_t)count * size <= MAX_BYTES &&
                 H5Tis_variable_str(type) <= 0;
    unsigned char *bytes = small ? make_bytes(o, (size_t)count * size, lie & BYTES, s) : NULL;
    if (!small) H5Pset_alloc_time(list, H5D_ALLOC_TIME_LATE); /* declared, not stored */
    make_groups(file, o->path);
    if (lie & SOFT_LINK && !o->attribute)
        H5Lcreate_soft("/elsewhere", file, o->path, H5P_DEFAULT, H5P_DEFAULT);
    if (o->attribute)
        write_attribute(file, o, type, space, bytes);
    else
        write_dataset(file, o, type, space, list, bytes);
    free(bytes);
    H5Pclose(list);
    H5Sclose(space);
    H5Tclose(type);
}

static void write_file(const char *path, const object *objects, size_t count, stream *s)
{
    hid_t access = H5Pcreate(H5P_FILE_ACCESS);
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
    H5Pset_libver_bounds(access, next(s) & 1 ? H5F_LIBVER_EARLIEST : H5F_LIBVER_LATEST,
                         H5F_LIBVER_LATEST);
    hid_t file = H5Fcreate(path, H5F_ACC_TRUNC, H5P_DEFAULT, access);
    if (file < 0) abort();
    for (size_t i = 0; i < count; i++) {
        make_groups(file, objects[i].path);
        if (objects[i].attribute && H5Lexists(file, objects[i].path, H5P_DEFAULT) <= 0 &&
            strcmp(objects[i].path, "/")) {
            hid_t group = H5Gcreate2(file, objects[i].path, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
            if (group >= 0) H5Gclose(group);
        }
        write_object(file, &objects[i], s);
    }
    H5Fclose(file);
    H5Pclose(access);
}

/* ---- corpus ------------------------------------------------------------------------------------
 */

static void try_corpus(const char *path, stream *s, bool must_load)
{
    enum { TOKENS = 12 };
    static const uint16_t tokens[TOKENS] = { 1, 2, 3, 40, 5, 6, 7, 8, 9, 10, 11, 12 };
    static const int64_t version = 1, vocab = 41, offsets[3] = { 0, 5, TOKENS };
    const uint64_t hash = XXH3_64bits(tokens, sizeof tokens);
    const object objects[] = {
        { "/tokens", NULL, U16, 1, { TOKENS }, tokens, true },
        { "/tokens_xxh3", NULL, U64, 1, { 1 }, &hash, false },
        { "/doc_offsets", NULL, I64, 1, { 3 }, offsets, false },
        { "/", "format_version", I64, 0, { 0 }, &version, false },
        { "/", "vocab_size", I64, 0, { 0 }, &vocab, false },
        { "/", "tokenizer", STRING, 0, { 0 }, "bytes", false },
        { "/", "split", STRING, 0, { 0 }, "all", false },
        { "/", "source_sha256", STRING, 0, { 0 }, "0123", false },
    };
    write_file(path, objects, sizeof objects / sizeof *objects, s);
    mt_corpus *corpus;
    if (mt_corpus_open(&corpus, path) != MT_OK) {
        if (must_load || !*mt_error_message()) abort();
        return;
    }
    const mt_corpus_info *info = mt_corpus_get_info(corpus);
    int32_t x[2 * 4], y[2 * 4];
    for (int64_t first = 0; first < 16; first += 2)
        if (mt_corpus_batch(corpus, 1, first, 2, 4, x, y) == MT_OK)
            for (int i = 0; i < 8; i++)
                if (x[i] < 0 || x[i] >= info->vocab_size || y[i] < 0 || y[i] >= info->vocab_size)
                    abort();
    for (int64_t i = 0; i < mt_corpus_windows(corpus, 4); i++)
        if (mt_corpus_window(corpus, 4, i, x, y) != MT_OK) abort();
    mt_corpus_close(&corpus);
}

/* ---- checkpoint --------------------------------------------------------------------------------
 */

/* A DONE that vouches for whatever model.h5 is: the contents are what is tested. */
static void write_done(const char *dir, const char *model)
{
    char hex[MT_HEX128_BYTES], text[512], path[256];
    int64_t bytes;
    if (mt_file_xxh128(hex, &bytes, model) != MT_OK) abort();
    int n = snprintf(text, sizeof text, "mixtape checkpoint 1\n%lld %s model.h5\n",
                     (long long)bytes, hex);
    n += snprintf(text + n, sizeof text - (size_t)n, "end %016llx\n",
                  (unsigned long long)XXH3_64bits(text, (size_t)n));
    snprintf(path, sizeof path, "%s/DONE", dir);
    if (mt_file_write_all(path, text, (size_t)n) != MT_OK) abort();
}

static void check(mt_status status)
{
    if (status == MT_OK) return;
    fprintf(stderr, "%s\n", mt_error_message());
    abort();
}

static mt_checkpoint_state *make_state(void)
{
    static mt_checkpoint_state state;
    static mt_model_config config;
    static struct mt_step_state step_state;
    static float m[4096], v[4096], bias[4];
    static mt_device *device;
    const mt_architecture *architecture;
    mt_param *p;
    const mt_param_spec w = { .name = "w", .members = 2, .m = 3, .k = 4 };
    if (state.params) return &state;
    check(mt_device_open(&device, "cpu", "portable", 1));
    check(mt_architecture_find(&architecture, "qwen3_moe"));
    mt_model_config_defaults(&config, architecture);
    config.num_experts = 4;
    check(mt_param_store_create(&state.params, device, MT_F32, MT_F32));
    check(mt_param_store_add(state.params, &p, &w));
    check(mt_param_add_part(p, 0, 0, 3, 2, "a"));
    check(mt_param_add_part(p, 1, 0, 3, 2, "b"));
    check(mt_param_store_allocate(state.params, false));
    state.config = &config, state.m = m, state.v = v, state.step_state = &step_state;
    state.moe_layers = 1, state.router_bias[0] = bias;
    return &state;
}

static void try_checkpoint(const char *dir, const char *model, stream *s, bool must_load)
{
    static const char config[] =
        "{\"model_type\":\"qwen3_moe\",\"vocab_size\":9,\"hidden_size\":8,\"num_hidden_layers\":1,"
        "\"num_attention_heads\":2,\"num_experts\":4,\"num_experts_per_tok\":2,"
        "\"moe_intermediate_size\":4}";
    static const float x[12] = { 1, 2, 3 }, bias[4] = { 0 };
    static const int64_t one = 1;
    static const double real = 0.5;
#define META(name, text)                                                                           \
    {                                                                                              \
        "/meta", name, STRING, 0, { 0 }, text, false                                               \
    }
#define MATRIX(name)                                                                               \
    {                                                                                              \
        name, NULL, F32, 2, { 3, 4 }, x, false                                                     \
    }
#define REAL(name)                                                                                 \
    {                                                                                              \
        "/optim", name, F64, 0, { 0 }, &real, false                                                \
    }
#define WHOLE(name)                                                                                \
    {                                                                                              \
        "/optim", name, I64, 0, { 0 }, &one, false                                                 \
    }
    static const object objects[] = {
        { "/meta", "format_version", I64, 0, { 0 }, &one, false },
        { "/meta", "step", I64, 0, { 0 }, &one, false },
        { "/meta", "seed", U64, 0, { 0 }, &one, false },
        META("config", config),
        META("run_config", "r"),
        META("source_config", ""),
        META("git_revision", "g"),
        META("kernel_set", "k"),
        META("compute", "f32"),
        META("corpus", "c"),
        MATRIX("/model/a"),
        MATRIX("/model/b"),
        MATRIX("/optim/m/a"),
        MATRIX("/optim/m/b"),
        MATRIX("/optim/v/a"),
        MATRIX("/optim/v/b"),
        { "/state/router_bias/0", NULL, F32, 1, { 4 }, bias, false },
        REAL("lr"),
        REAL("power1"),
        REAL("power2"),
        REAL("bias1"),
        REAL("bias2"),
        REAL("clip"),
        REAL("grad_norm"),
        WHOLE("skip"),
        WHOLE("applied"),
        WHOLE("skipped"),
        WHOLE("skipped_in_a_row"),
    };
    write_file(model, objects, sizeof objects / sizeof *objects, s);
    write_done(dir, model);
    mt_checkpoint *checkpoint;
    mt_status status = mt_checkpoint_open(&checkpoint, dir);
    if (status == MT_OK) {
        for (int64_t i = 0; i < mt_checkpoint_count(checkpoint); i++) {
            mt_tensor t;
            mt_checkpoint_tensor(checkpoint, "/model", mt_checkpoint_name(checkpoint, i), &t);
        }
        status = mt_checkpoint_restore(make_state(), checkpoint);
    }
    if (must_load) check(status);
    if (status != MT_OK && !*mt_error_message()) abort();
    mt_checkpoint_close(&checkpoint);
}

static char dir[64];

static void remove_dir(void)
{
    mt_dir_remove(dir);
}

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size)
{
    char model[128];
    if (!*dir) {
        uint64_t number;
        if (getrandom(&number, sizeof number, 0) != sizeof number) abort();
        snprintf(dir, sizeof dir, "%s/fuzz_%016llx", access("/dev/shm", W_OK) ? "/tmp" : "/dev/shm",
                 (unsigned long long)number);
        if (mkdir(dir, 0700)) abort();
        atexit(remove_dir);
    }
    snprintf(model, sizeof model, "%s/model.h5", dir);
    stream s = { data + (size > 0), data + size };
    bool honest = true;
    for (size_t i = 1; i < size; i++) honest &= data[i] == 0;
    unlink(model);
    if (size && data[0] & 1)
        try_checkpoint(dir, model, &s, honest);
    else
        try_corpus(model, &s, honest);
    return 0;
}
