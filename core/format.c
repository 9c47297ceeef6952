/* The format table: NUMERICS sections 2 and 3, a row per format. */
#include "core/format.h"

#include <stdio.h>

#define PLAIN(ID, NAME)                                                                            \
    [MT_FORMAT_##ID] = { .id = MT_FORMAT_##ID,                                                     \
                         .name = NAME,                                                             \
                         .dtype = MT_##ID,                                                         \
                         .element = MT_ELEMENT_PLAIN,                                              \
                         .scale = MT_SCALE_NONE,                                                   \
                         .codes_per_byte = 1,                                                      \
                         .shard_atom = 1 }

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
                               .block = 0,
                               .codes_per_byte = 1,
                               .column_transposed = true,
                               .shard_atom = 1 },
    [MT_FORMAT_FP8_DELAYED] = { .id = MT_FORMAT_FP8_DELAYED,
                                .name = "fp8_delayed",
                                .dtype = MT_U8,
                                .element = MT_ELEMENT_E4M3,
                                .scale = MT_SCALE_F32,
                                .block = 0,
                                .codes_per_byte = 1,
                                .column_transposed = true,
                                .shard_atom = 1 },
    [MT_FORMAT_FP8_BLOCK] = { .id = MT_FORMAT_FP8_BLOCK,
                              .name = "fp8_block",
                              .dtype = MT_U8,
                              .element = MT_ELEMENT_E4M3,
                              .scale = MT_SCALE_F32,
                              .block = 128,
                              .codes_per_byte = 1,
                              .column_transposed = true,
                              .shard_atom = 128 },
    [MT_FORMAT_MXFP8] = { .id = MT_FORMAT_MXFP8,
                          .name = "mxfp8",
                          .dtype = MT_U8,
                          .element = MT_ELEMENT_E4M3,
                          .scale = MT_SCALE_E8M0,
                          .block = 32,
                          .codes_per_byte = 1,
                          .shard_atom = 32 },
    [MT_FORMAT_MXFP6_E3M2] = { .id = MT_FORMAT_MXFP6_E3M2,
                               .name = "mxfp6_e3m2",
                               .dtype = MT_U8,
                               .element = MT_ELEMENT_E3M2,
                               .scale = MT_SCALE_E8M0,
                               .block = 32,
                               .codes_per_byte = 1,
                               .shard_atom = 32 },
    [MT_FORMAT_MXFP6_E2M3] = { .id = MT_FORMAT_MXFP6_E2M3,
                               .name = "mxfp6_e2m3",
                               .dtype = MT_U8,
                               .element = MT_ELEMENT_E2M3,
                               .scale = MT_SCALE_E8M0,
                               .block = 32,
                               .codes_per_byte = 1,
                               .shard_atom = 32 },
    [MT_FORMAT_MXFP4] = { .id = MT_FORMAT_MXFP4,
                          .name = "mxfp4",
                          .dtype = MT_U8,
                          .element = MT_ELEMENT_E2M1,
                          .scale = MT_SCALE_E8M0,
                          .block = 32,
                          .codes_per_byte = 2,
                          .shard_atom = 32 },
    [MT_FORMAT_NVFP4] = { .id = MT_FORMAT_NVFP4,
                          .name = "nvfp4",
                          .dtype = MT_U8,
                          .element = MT_ELEMENT_E2M1,
                          .scale = MT_SCALE_E4M3,
                          .block = 16,
                          .second_level = true,
                          .codes_per_byte = 2,
                          .column_transposed = true,
                          .shard_atom = 16 },
};

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
