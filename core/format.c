/* The format table: NUMERICS sections 2 and 3, a row per format. */
#include "core/format.h"

#include <stdio.h>

const uint16_t mt_rht_default_mask = 0xD7E8;

const mt_element_info mt_elements[MT_ELEMENT_COUNT] = {
    /*                     name    m   bias sign emax max     max    nan    inf code */
    [MT_ELEMENT_E4M3] = { "e4m3", 3, 7, 7, 8, 448, 0x7e, 0x7f, 0 },
    [MT_ELEMENT_E5M2] = { "e5m2", 2, 15, 7, 15, 57344, 0x7b, 0x7f, 0x7c },
    [MT_ELEMENT_E3M2] = { "e3m2", 2, 3, 5, 4, 28, 0x1f, 0x1f, 0 },
    [MT_ELEMENT_E2M3] = { "e2m3", 3, 1, 5, 2, 7.5f, 0x1f, 0x1f, 0 },
    [MT_ELEMENT_E2M1] = { "e2m1", 1, 1, 3, 2, 6, 0x07, 0x07, 0 },
};

enum {
    ANY = MT_OPT_SR | MT_OPT_RHT | MT_OPT_SOURCE, /* every quantized format */
    MX = ANY | MT_OPT_2D | MT_OPT_SCALE,
};

#define PLAIN(ID, NAME)                                                                            \
    [MT_FORMAT_##ID] = {                                                                           \
        .id = MT_FORMAT_##ID, .name = NAME, .dtype = MT_##ID, .codes_per_byte = 1, .shard_atom = 1 \
    }

/* What the microscaling formats share. */
#define MICRO(ID, NAME, ELEMENT)                                                                   \
    .id = MT_FORMAT_##ID, .name = NAME, .dtype = MT_U8, .element = MT_ELEMENT_##ELEMENT,           \
    .scale = MT_SCALE_E8M0, .block = 32, .block_major = { false, true }, .shard_atom = 32

const mt_format mt_formats[MT_FORMAT_COUNT] = {
    PLAIN(F64, "f64"),
    PLAIN(F32, "f32"),
    PLAIN(BF16, "bf16"),
    PLAIN(F16, "f16"),
    [MT_FORMAT_FP8_TENSOR] = { .id = MT_FORMAT_FP8_TENSOR,
                               .name = "fp8_tensor",
                               .dtype = MT_U8,
                               .element = MT_ELEMENT_E4M3,
                               .scale = MT_SCALE_F32,
                               .codes_per_byte = 1,
                               .column_transposed = true,
                               .shard_atom = 1,
                               .options = ANY | MT_OPT_E5M2 | MT_OPT_POW2 },
    [MT_FORMAT_FP8_DELAYED] = { .id = MT_FORMAT_FP8_DELAYED,
                                .name = "fp8_delayed",
                                .dtype = MT_U8,
                                .element = MT_ELEMENT_E4M3,
                                .scale = MT_SCALE_F32,
                                .codes_per_byte = 1,
                                .column_transposed = true,
                                .delayed = true,
                                .shard_atom = 1,
                                .options = ANY | MT_OPT_E5M2 },
    [MT_FORMAT_FP8_BLOCK] = { .id = MT_FORMAT_FP8_BLOCK,
                              .name = "fp8_block",
                              .dtype = MT_U8,
                              .element = MT_ELEMENT_E4M3,
                              .scale = MT_SCALE_F32,
                              .block = 128,
                              .codes_per_byte = 1,
                              .column_transposed = true,
                              .block_major = { true, true },
                              .pow2 = true,
                              .shard_atom = 128,
                              .options = ANY | MT_OPT_E5M2 | MT_OPT_POW2 | MT_OPT_2D },
    [MT_FORMAT_MXFP8] = { MICRO(MXFP8, "mxfp8", E4M3), .codes_per_byte = 1,
                          .options = MX | MT_OPT_E5M2 },
    [MT_FORMAT_MXFP6_E3M2] = { MICRO(MXFP6_E3M2, "mxfp6_e3m2", E3M2), .codes_per_byte = 1,
                               .options = MX },
    [MT_FORMAT_MXFP6_E2M3] = { MICRO(MXFP6_E2M3, "mxfp6_e2m3", E2M3), .codes_per_byte = 1,
                               .options = MX },
    [MT_FORMAT_MXFP4] = { MICRO(MXFP4, "mxfp4", E2M1), .codes_per_byte = 2, .options = MX },
    [MT_FORMAT_NVFP4] = { .id = MT_FORMAT_NVFP4,
                          .name = "nvfp4",
                          .dtype = MT_U8,
                          .element = MT_ELEMENT_E2M1,
                          .scale = MT_SCALE_E4M3,
                          .block = 16,
                          .second_level = true,
                          .codes_per_byte = 2,
                          .column_transposed = true,
                          .shard_atom = 16,
                          .options = ANY | MT_OPT_2D | MT_OPT_4OVER6 | MT_OPT_ERR },
};

mt_format_options mt_format_defaults(const mt_format *format)
{
    return (mt_format_options){ .element = format->element, .pow2 = format->pow2 };
}

const mt_format *mt_format_plain(mt_dtype dtype)
{
    for (int i = 0; i < MT_FORMAT_COUNT; i++)
        if (mt_formats[i].element == MT_ELEMENT_PLAIN && mt_formats[i].dtype == dtype)
            return &mt_formats[i];
    return NULL;
}

mt_status mt_format_find(const mt_format **format, const char *name)
{
    char known[256];
    size_t used = 0;
    MT_REQUIRE(name, MT_EINVAL, "format: no name");
    for (int i = 0; i < MT_FORMAT_COUNT; i++) {
        const mt_format *f = &mt_formats[i];
        if (!strcmp(f->name, name)) {
            *format = f;
            return MT_OK;
        }
        used += (size_t)snprintf(known + used, sizeof known - used, " %s", f->name);
    }
    return MT_FAIL(MT_ECONFIG, "format '%s' is not one of%s", name, known);
}
