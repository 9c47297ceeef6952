/* Argument checks of attention. */
#include "kernels/attention.h"

#include "kernels/check.h"

static mt_status check_heads(const char *op, int64_t query_heads, int64_t kv_heads,
                             int64_t head_dim)
{
    MT_REQUIRE(query_heads > 0 && kv_heads > 0 && query_heads % kv_heads == 0, MT_EINVAL,
               "%s: query_heads %lld must be a positive multiple of kv_heads %lld", op,
               (long long)query_heads, (long long)kv_heads);
    MT_REQUIRE(head_dim > 0, MT_EINVAL, "%s: head_dim is %lld, must be positive", op,
               (long long)head_dim);
    return MT_OK;
}

mt_status mt_attention_fwd_check(const struct mt_attention_fwd_args *args)
{
    MT_CHECK_EXTENT("attention_fwd", args, batch);
    MT_CHECK_EXTENT("attention_fwd", args, sequence);
    MT_TRY(check_heads("attention_fwd", args->query_heads, args->kv_heads, args->head_dim));
    int64_t count = args->batch * args->sequence;
    MT_CHECK_POINTER("attention_fwd", args, y, count);
    MT_CHECK_POINTER("attention_fwd", args, lse, count);
    MT_CHECK_POINTER("attention_fwd", args, qkv, count);
    return MT_OK;
}

mt_status mt_attention_bwd_check(const struct mt_attention_bwd_args *args)
{
    MT_CHECK_EXTENT("attention_bwd", args, batch);
    MT_CHECK_EXTENT("attention_bwd", args, sequence);
    MT_TRY(check_heads("attention_bwd", args->query_heads, args->kv_heads, args->head_dim));
    int64_t count = args->batch * args->sequence;
    MT_CHECK_POINTER("attention_bwd", args, dqkv, count);
    MT_CHECK_POINTER("attention_bwd", args, dy, count);
    MT_CHECK_POINTER("attention_bwd", args, qkv, count);
    MT_CHECK_POINTER("attention_bwd", args, y, count);
    MT_CHECK_POINTER("attention_bwd", args, lse, count);
    return MT_OK;
}
