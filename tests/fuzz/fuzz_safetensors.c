/* Fuzzes what reads a Hugging Face directory. The first byte chooses what the rest is: a
 * safetensors file; its header, to which the length and 64 bytes of data are added; an index; a
 * config.json, which, if accepted, must be written back and read again to the same text. Header and
 * config also come as phrases: each byte stands for a piece of text, so that little is needed to
 * say much. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "train/fileio.h"
#include "train/hf.h"
#include "train/safetensors.h"

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size);

static char dir[64], model_path[128], index_path[128];

static void remove_dir(void)
{
    mt_dir_remove(dir);
}

static void make_dir(void)
{
    if (*dir) return;
    uint64_t number;
    if (getrandom(&number, sizeof number, 0) != sizeof number) abort();
    snprintf(dir, sizeof dir, "%s/fuzz_%016llx", access("/dev/shm", W_OK) ? "/tmp" : "/dev/shm",
             (unsigned long long)number);
    if (mkdir(dir, 0700)) abort();
    snprintf(model_path, sizeof model_path, "%s/model.safetensors", dir);
    snprintf(index_path, sizeof index_path, "%s/model.safetensors.index.json", dir);
    atexit(remove_dir);
}

static void put(const char *path, const void *a, size_t n, const void *b, size_t m, const void *c,
                size_t k)
{
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(a, 1, n, f) != n || fwrite(b, 1, m, f) != m || fwrite(c, 1, k, f) != k ||
        fclose(f))
        abort();
}

static volatile unsigned char seen; /* so that reading cannot be left out */

/* Reads every byte that the set claims to have. */
static void touch(mt_safetensors *set)
{
    for (int64_t i = 0; i < mt_safetensors_count(set); i++) {
        const mt_st_tensor *t = mt_safetensors_get(set, i);
        mt_dtype dtype;
        if (mt_safetensors_find(set, t->name) != t) abort();
        int64_t count = 1;
        for (int d = 0; d < t->ndim; d++) count *= t->shape[d];
        if (mt_st_tensor_dtype(&dtype, t) == MT_OK &&
            (size_t)count * mt_dtype_size(dtype) != t->bytes)
            abort();
        unsigned char sum = 0;
        for (size_t b = 0; b < t->bytes; b++) sum ^= ((const unsigned char *)t->data)[b];
        seen = sum;
    }
}

static void try_file(void)
{
    mt_safetensors *set;
    if (mt_safetensors_open_dir(&set, dir) == MT_OK) touch(set);
    mt_safetensors_close(&set);
}

static void try_config(const char *text, size_t size)
{
    for (int own = 0; own < 2; own++) {
        mt_model_config config, again;
        char *first, *second;
        if (mt_hf_config_parse(&config, text, size, "config", own) != MT_OK) continue;
        if (mt_hf_config_format(&first, &config, MT_F32, NULL, own) != MT_OK) abort();
        if (mt_hf_config_parse(&again, first, strlen(first), "again", own) != MT_OK) {
            fprintf(stderr, "not read back: %s\n%s\n", mt_error_message(), first);
            abort();
        }
        if (mt_hf_config_format(&second, &again, MT_F32, NULL, own) != MT_OK) abort();
        if (strcmp(first, second)) abort();
        free(first);
        free(second);
    }
}

/* Phrases of headers, and of descriptions of models. */
static const char *const header_phrases[] = {
    "\"a\":",
    "\"b\":",
    "\"\\u00e9\":",
    "\"__metadata__\":{\"format\":\"pt\"}",
    "{",
    "}",
    "[",
    "]",
    ",",
    "\"dtype\":\"F32\",",
    "\"dtype\":\"BF16\",",
    "\"dtype\":\"F4\",",
    "\"dtype\":",
    "\"shape\":[2],",
    "\"shape\":[],",
    "\"shape\":[0,3],",
    "\"shape\":",
    "\"data_offsets\":[0,8]",
    "\"data_offsets\":[8,12]",
    "\"data_offsets\":[0,64]",
    "\"data_offsets\":",
    "0",
    "1",
    "4",
    "16",
    "32",
    "-1",
    "1.5",
    "null",
    "true",
    "9223372036854775807",
    "4611686018427387904",
    " ",
    "\"x\"",
    "{\"dtype\":\"F32\",\"shape\":[16],\"data_offsets\":[0,64]}",
    "{\"dtype\":\"F64\",\"shape\":[2,2],\"data_offsets\":[0,32]}",
    "{\"dtype\":\"U8\",\"shape\":[32],\"data_offsets\":[32,64]}",
    "{\"dtype\":\"F16\",\"shape\":[2,2,4],\"data_offsets\":[32,64]}",
};
static const char *const config_phrases[] = {
    "\"model_type\":\"qwen3_moe\"",
    "\"model_type\":\"olmoe\"",
    "\"model_type\":\"mixtral\"",
    "\"vocab_size\":9,\"hidden_size\":8,\"num_hidden_layers\":3,\"num_attention_heads\":2",
    "\"num_experts_per_tok\":2,\"num_experts\":4,\"moe_intermediate_size\":6",
    "\"num_experts_per_tok\":2,\"num_local_experts\":4,\"intermediate_size\":6",
    "\"vocab_size\":",
    "\"num_experts\":",
    "\"num_local_experts\":",
    "\"num_hidden_layers\":",
    "\"intermediate_size\":",
    "\"mlp_only_layers\":",
    "\"decoder_sparse_step\":",
    "\"head_dim\":",
    "\"num_key_value_heads\":",
    "\"norm_topk_prob\":",
    "\"rope_theta\":",
    "\"rms_norm_eps\":",
    "\"rope_parameters\":",
    "\"rope_scaling\":",
    "\"rope_type\":",
    "\"default\"",
    "\"yarn\"",
    "\"sliding_window\":",
    "\"use_sliding_window\":",
    "\"attention_bias\":",
    "\"clip_qkv\":",
    "\"layer_types\":",
    "\"full_attention\"",
    "\"hidden_act\":",
    "\"silu\"",
    "\"aux_loss\":",
    "\"switch\"",
    "\"z_loss_coef\":",
    "\"capacity_factor\":",
    "\"tie_word_embeddings\":",
    "{",
    "}",
    "[",
    "]",
    ",",
    "0",
    "1",
    "2",
    "4",
    "16",
    "-1",
    "0.1",
    "1e-6",
    "1e6",
    "1e308",
    "null",
    "true",
    "false",
    "9223372036854775807",
    "4294967296",
};

/* The phrases that the bytes stand for, freed by the caller. */
static char *say(const char *const *phrases, size_t count, const unsigned char *data, size_t size,
                 size_t *length)
{
    size_t room = 2;
    for (size_t i = 0; i < size; i++) room += strlen(phrases[data[i] % count]);
    char *text = malloc(room);
    if (!text) abort();
    *length = (size_t)snprintf(text, room, "{");
    for (size_t i = 0; i < size; i++) {
        size_t n = strlen(phrases[data[i] % count]);
        memcpy(text + *length, phrases[data[i] % count], n);
        *length += n;
    }
    return text;
}

static void try_header(const void *header, size_t size)
{
    static const unsigned char zeros[64];
    unsigned char length[8] = { 0 };
    for (int i = 0; i < 8; i++) length[i] = (unsigned char)((uint64_t)size >> (8 * i));
    put(model_path, length, 8, header, size, zeros, sizeof zeros);
    try_file();
}

#define SAY(phrases) say(phrases, sizeof phrases / sizeof *phrases, data, size, &length)

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size)
{
    char *text = NULL;
    size_t length;
    if (!size) return 0;
    make_dir();
    unlink(model_path);
    int kind = *data++ % 6;
    size--;
    switch (kind) {
    case 0:
        put(model_path, data, size, "", 0, "", 0);
        try_file();
        break;
    case 1: try_header(data, size); break;
    case 2:
        put(index_path, data, size, "", 0, "", 0);
        try_file();
        break;
    case 3: try_config((const char *)data, size); break;
    case 4:
        text = SAY(header_phrases);
        try_header(text, length);
        break;
    case 5:
        text = SAY(config_phrases);
        try_config(text, length);
        break;
    }
    free(text);
    return 0;
}
