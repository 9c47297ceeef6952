/* What compute copies of weights over ranks are held against: one rank's codes; and weights that
 * are hard to round. */
#pragma once

#include "tests/dist/ranks.h"

#include "core/param.h"
#include "layers/functional.h"

/* One rank's direction of w as codes: a device may keep what they decode to instead, while shards
 * stay codes; then they are made from its master, as group_quantize makes them, in *memory. */
static inline mt_status one_ranks_codes(mt_direction *codes, void **memory, size_t *bytes,
                                        mt_param *w, mt_dir dir)
{
    mt_stream stream = { rank_device, NULL };
    mt_qtensor made = mt_qtensor_select(&w->weight, dir);
    void *master;
    *memory = NULL, *bytes = 0, *codes = made.dir[dir];
    if (codes->layout != MT_LAYOUT_DECODED) return MT_OK;
    made.dir[dir] = mt_direction_of(mt_direction_spec(codes));
    *bytes = mt_qtensor_bytes(&made);
    MT_TRY(mt_device_alloc(rank_device, memory, *bytes, MT_MEMORY_STATE));
    mt_qtensor_place(&made, *memory);
    *codes = made.dir[dir];
    MT_TRY(mt_linear_master(w, &stream, &master));
    mt_qtensor source = mt_qtensor_plain(w->group, w->dtype, master);
    struct mt_quantize_args args = mt_linear_quantize_args(w, MT_OPERAND_W);
    args.src = &source, args.out = &made;
    MT_TRY(mt_quantize(&stream, &args));
    return mt_device_synchronize(rank_device);
}

/* `same` of p and one rank's codes of it. */
static inline mt_status same_as_one_rank(const mt_param *p, mt_param *one, mt_dir dir,
                                         mt_status (*same)(const mt_param *p,
                                                           const mt_direction *codes, mt_dir dir))
{
    mt_direction codes;
    void *memory;
    size_t bytes;
    mt_status status = one_ranks_codes(&codes, &memory, &bytes, one, dir);
    if (status == MT_OK) status = same(p, &codes, dir);
    mt_device_free(rank_device, &memory, bytes, MT_MEMORY_STATE);
    return status;
}

/* Weights of this rank become exact ties between two bf16, where casts and halves of split masters
 * part. */
static inline mt_status put_ties(mt_trainer *trainer)
{
    mt_param_store *store = mt_model_params(mt_trainer_model(trainer));
    mt_stream stream = { rank_device, NULL };
    for (int64_t i = 0; i < mt_param_store_count(store); i++) {
        mt_param *p = mt_param_store_get(store, i);
        float *x = malloc((size_t)p->own.count * sizeof *x + 1);
        if (!x) return MT_FAIL(MT_ENOMEM, "no memory for %s", p->name);
        mt_status status = mt_param_read_master(store, p, p->own.first, p->own.count, x);
        for (int64_t j = 0; j < p->own.count && status == MT_OK; j++)
            x[j] = mt_f32_from_bits((mt_f32_bits(x[j]) & 0xffff0000u) | 0x8000u);
        if (status == MT_OK)
            status = mt_param_write_master(store, p, p->own.first, p->own.count, x);
        free(x);
        if (status != MT_OK) return mt_error_pass(status, __FILE__, __LINE__);
    }
    return mt_model_refresh(mt_trainer_model(trainer), &stream);
}
