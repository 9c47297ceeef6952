/* Argument checks of the loss. */
#include "kernels/loss.h"

#include "kernels/check.h"

mt_status mt_cross_entropy_fwd_check(const struct mt_cross_entropy_fwd_args *args)
{
    MT_CHECK_EXTENT("cross_entropy_fwd", args, tokens);
    MT_CHECK_POSITIVE("cross_entropy_fwd", args, vocab);
    MT_CHECK_POINTER("cross_entropy_fwd", args, loss, 1);
    MT_CHECK_POINTER("cross_entropy_fwd", args, scale, 1);
    MT_CHECK_POINTER("cross_entropy_fwd", args, lse, args->tokens);
    MT_CHECK_POINTER("cross_entropy_fwd", args, logits, args->tokens);
    MT_CHECK_POINTER("cross_entropy_fwd", args, targets, args->tokens);
    return MT_OK;
}

mt_status mt_cross_entropy_bwd_check(const struct mt_cross_entropy_bwd_args *args)
{
    MT_CHECK_EXTENT("cross_entropy_bwd", args, tokens);
    MT_CHECK_POSITIVE("cross_entropy_bwd", args, vocab);
    MT_CHECK_POINTER("cross_entropy_bwd", args, dlogits, args->tokens);
    MT_CHECK_POINTER("cross_entropy_bwd", args, logits, args->tokens);
    MT_CHECK_POINTER("cross_entropy_bwd", args, lse, args->tokens);
    MT_CHECK_POINTER("cross_entropy_bwd", args, targets, args->tokens);
    MT_CHECK_POINTER("cross_entropy_bwd", args, scale, args->tokens);
    MT_CHECK_POINTER("cross_entropy_bwd", args, dloss, args->tokens);
    return MT_OK;
}
