/* Coded lines of the expert exchange (kernels/exchange.h): where codes and scales lie, and a
 * block's scale; the same source for the CPU and the GPU. */
#pragma once

#include "kernels/codec.h"
#include "kernels/ops.h"

struct mt_coding {
    mt_codec codec;
    bool bytes; /* scales are E8M0, else f32 */
    bool floor; /* option scale=floor */
    float max, inverse;
    int32_t emax;
    int block, codes_per_byte;
    float largest;        /* of the dtype */
    int64_t scales, line; /* where scales begin, and the end, in bytes */
};

static inline struct mt_coding mt_coding_of(mt_dtype dtype, int64_t width,
                                            const mt_format_spec *spec)
{
    const mt_element_info *e = &mt_elements[spec->options.element];
    const mt_format *f = spec->format;
    struct mt_coding c;
    c.codec = mt_codec_of(spec->options.element);
    c.bytes = f->scale == MT_SCALE_E8M0;
    c.floor = spec->options.scale_floor;
    c.max = e->max, c.inverse = 1.0f / e->max, c.emax = e->emax;
    c.block = f->block, c.codes_per_byte = f->codes_per_byte;
    c.largest = dtype == MT_BF16 ? 0x1.fep127f : FLT_MAX;
    c.scales = ((width + f->codes_per_byte - 1) / f->codes_per_byte + 3) / 4 * 4;
    int64_t blocks = (width + f->block - 1) / f->block;
    c.line = (c.scales + blocks * (c.bytes ? 1 : 4) + 15) / 16 * 16;
    return c;
}

/* What a block of this amax is multiplied by; *stored: its scale in the line, a byte or f32 bits.
 */
MT_CODEC_INLINE float mt_coding_scale(const struct mt_coding *c, float amax, uint32_t *stored)
{
    if (c->bytes) {
        int32_t exponent = mt_e8m0_exponent(amax, c->inverse, c->emax, c->floor);
        *stored = (uint32_t)exponent;
        return mt_e8m0_scale(254 - exponent);
    }
    float s = mt_encode_scale(amax, c->max, true, FLT_MAX);
    *stored = mt_f32_bits(1.0f / s);
    return s;
}

/* What a stored scale multiplies, and how large a value may become. */
MT_CODEC_INLINE float mt_coding_value(const struct mt_coding *c, uint32_t stored, float *largest)
{
    *largest = c->bytes && stored >= 0xfe ? mt_f32_from_bits(0x7f800000) : c->largest;
    if (!c->bytes) return mt_f32_from_bits(stored);
    return stored == 0xff ? mt_f32_from_bits(0x7fc00000) : mt_e8m0_scale((int32_t)stored);
}

/* The value of a code. NaN stays. */
MT_CODEC_INLINE float mt_coding_decode(const struct mt_coding *c, int32_t code, float scale,
                                       float largest)
{
    float y = mt_decode(c->codec, (uint8_t)code) * scale;
    y = y > largest ? largest : y;
    return y < -largest ? -largest : y;
}
