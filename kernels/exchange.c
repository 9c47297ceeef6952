/* Argument checks of the expert exchange. */
#include "kernels/exchange.h"

#include "kernels/check.h"
#include "kernels/coding.h"

static const mt_format_spec plain; /* lines that are not coded */

bool mt_exchange_codes(const mt_format_spec *spec)
{
    const mt_format *f = spec->format;
    const mt_format_options *o = &spec->options;
    bool powers = f && (f->scale == MT_SCALE_E8M0 || (f->scale == MT_SCALE_F32 && o->pow2));
    return powers && f->block > 0 && !o->two_d && !o->sr && !o->rht && !o->from_dequantized;
}

int64_t mt_exchange_line(mt_dtype dtype, int64_t width, const mt_format_spec *coded)
{
    if (!coded->format) return width * (int64_t)mt_dtype_size(dtype);
    struct mt_coding c = mt_coding_of(dtype, width, coded);
    return c.line;
}

int64_t mt_exchange_head(mt_dtype dtype, int64_t experts, int64_t rows)
{
    return 8 * (experts + 1) + rows * (int64_t)mt_dtype_size(mt_dtype_wide(dtype));
}

static mt_status check_coded(const char *op, const mt_format_spec *coded)
{
    MT_TRY(mt_format_spec_check(coded));
    MT_REQUIRE(mt_exchange_codes(coded), MT_EINVAL,
               "%s: lines cannot be coded in %s: a row's scales must be powers of two of its own "
               "blocks, its codes the nearest",
               op, coded->format->name);
    return MT_OK;
}

static mt_status check_blocks(const char *op, const struct mt_blocks *b, int64_t width,
                              mt_dtype dtype, const mt_format_spec *coded)
{
    int64_t line = mt_exchange_line(dtype, width, coded);
    MT_CHECK_POSITIVE(op, b, ranks);
    MT_CHECK_POSITIVE(op, b, experts);
    MT_REQUIRE(width > 0, MT_EINVAL, "%s: width is %lld, must be positive", op, (long long)width);
    MT_REQUIRE(b->head_lines > 0 && b->lines >= b->head_lines, MT_EINVAL,
               "%s: blocks of %lld lines, %lld of them the head", op, (long long)b->lines,
               (long long)b->head_lines);
    MT_REQUIRE(b->lines <= INT32_MAX / b->ranks, MT_EINVAL,
               "%s: %lld blocks of %lld lines do not fit int32", op, (long long)b->ranks,
               (long long)b->lines);
    MT_REQUIRE(b->lines * line % 8 == 0, MT_EINVAL,
               "%s: blocks of %lld lines of %lld bytes, must be a multiple of 8", op,
               (long long)b->lines, (long long)line);
    MT_REQUIRE(b->head_lines * line >= 8 * (b->experts + 1), MT_EINVAL,
               "%s: a head of %lld bytes for %lld experts needs %lld", op,
               (long long)(b->head_lines * line), (long long)b->experts,
               (long long)(8 * (b->experts + 1)));
    return MT_OK;
}

/* Heads have room for a real of each row. */
static mt_status check_reals(const char *op, const struct mt_blocks *b, int64_t width,
                             mt_dtype dtype)
{
    int64_t head = b->head_lines * mt_exchange_line(dtype, width, &plain);
    int64_t needs = mt_exchange_head(dtype, b->experts, b->lines - b->head_lines);
    MT_REQUIRE(head >= needs, MT_EINVAL,
               "%s: a head of %lld bytes, with a real of each of %lld rows it needs %lld", op,
               (long long)head, (long long)(b->lines - b->head_lines), (long long)needs);
    return MT_OK;
}

mt_status mt_exchange_plan_check(const struct mt_exchange_plan_args *args)
{
    const char *op = "exchange_plan";
    int64_t n = args->tokens;
    MT_TRY(check_blocks(op, &args->blocks, args->width, args->dtype, &plain));
    MT_CHECK_EXTENT(op, args, tokens);
    MT_CHECK_POSITIVE(op, args, top_k);
    MT_CHECK_POINTER(op, args, chosen, n);
    MT_CHECK_POINTER(op, args, position, n);
    MT_CHECK_POINTER(op, args, row_token, n);
    MT_CHECK_POINTER(op, args, offsets, 1);
    MT_CHECK_POINTER(op, args, heads, 1);
    MT_CHECK_POINTER(op, args, token_line, n);
    MT_CHECK_POINTER(op, args, line_token, 1);
    MT_CHECK_POINTER(op, args, most, 1);
    return MT_OK;
}

mt_status mt_exchange_pack_check(const struct mt_exchange_pack_args *args)
{
    const char *op = "exchange_pack";
    MT_TRY(check_blocks(op, &args->blocks, args->width, args->dtype, &plain));
    if (args->coded.format) {
        MT_TRY(check_coded(op, &args->coded));
        MT_TRY(check_blocks(op, &args->blocks, args->width, args->dtype, &args->coded));
        MT_CHECK_POINTER(op, args, x, 1);
    }
    MT_CHECK_POINTER(op, args, y, 1);
    MT_CHECK_POINTER(op, args, heads, 1);
    MT_REQUIRE(!args->reals || !args->coded.format, MT_EINVAL,
               "%s: reals are for lines that are not coded", op);
    return args->reals ? check_reals(op, &args->blocks, args->width, args->dtype) : MT_OK;
}

mt_status mt_exchange_unpack_check(const struct mt_exchange_unpack_args *args)
{
    const char *op = "exchange_unpack";
    MT_REQUIRE(args->coded.format, MT_EINVAL, "%s: no format", op);
    MT_TRY(check_coded(op, &args->coded));
    MT_TRY(check_blocks(op, &args->blocks, args->width, args->dtype, &plain));
    MT_TRY(check_blocks(op, &args->blocks, args->width, args->dtype, &args->coded));
    MT_CHECK_POINTER(op, args, y, 1);
    MT_CHECK_POINTER(op, args, x, 1);
    return MT_OK;
}

mt_status mt_exchange_arrivals_check(const struct mt_exchange_arrivals_args *args)
{
    const char *op = "exchange_arrivals";
    MT_TRY(check_blocks(op, &args->blocks, args->width, args->dtype, &plain));
    MT_CHECK_POINTER(op, args, y, 1);
    MT_CHECK_POINTER(op, args, heads, 1);
    MT_CHECK_POINTER(op, args, counts, 1);
    MT_CHECK_POINTER(op, args, offsets, 1);
    MT_CHECK_POINTER(op, args, row_line, 1);
    MT_CHECK_POINTER(op, args, line_row, 1);
    for (int i = 0; i < MT_ROUTE_WIDTHS; i++) MT_CHECK_EXTENT(op, args, widths[i]);
    return MT_OK;
}

mt_status mt_exchange_weights_bwd_check(const struct mt_exchange_weights_bwd_args *args)
{
    const char *op = "exchange_weights_bwd";
    int64_t n = args->tokens;
    MT_TRY(check_blocks(op, &args->blocks, args->width, args->dtype, &plain));
    MT_TRY(check_reals(op, &args->blocks, args->width, args->dtype));
    MT_CHECK_EXTENT(op, args, tokens);
    MT_CHECK_POSITIVE(op, args, top_k);
    MT_CHECK_POINTER(op, args, x, 1);
    MT_CHECK_POINTER(op, args, dweights, n);
    MT_CHECK_POINTER(op, args, weights, n);
    MT_CHECK_POINTER(op, args, token_line, n);
    return MT_OK;
}
