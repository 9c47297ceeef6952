/* Split masters (NUMERICS section 6): both ways of the split, and what AdamW makes of NaN. */
#include "tests/kernels/threads.h"

/* Every bf16 with every i16 near the places where rounding turns: split and joined, nothing is
 * lost; the upper half is the nearest bf16, ties away from zero. NaN becomes the one of casts. */
static void test_master_is_lossless(void **state)
{
    (void)state;
    static const uint32_t lows[] = { 0, 1, 2, 0x7ffe, 0x7fff, 0x8000, 0x8001, 0xfffe, 0xffff };
    enum { LOWS = sizeof lows / sizeof *lows, COUNT = LOWS << 16 };
    mt_stream stream = on_threads(2);
    uint16_t *high = test_alloc(COUNT, MT_U16);
    int16_t *low = test_alloc(COUNT, MT_U16);
    float *y = test_alloc(COUNT, MT_F32);
    for (uint32_t i = 0; i < COUNT; i++) {
        uint32_t bits = i / LOWS << 16 | lows[i % LOWS];
        if ((bits & 0x7fffffff) > 0x7f800000) bits = 0x7fff0000;
        high[i] = mt_master_high(i / LOWS << 16 | lows[i % LOWS]);
        low[i] = mt_master_low(i / LOWS << 16 | lows[i % LOWS]);
        assert_int_equal(high[i], (uint16_t)((bits >> 16) + (bits >> 15 & 1)));
        assert_int_equal((uint16_t)low[i], bits & 0xffff);
        double x = (double)mt_f32_from_bits(bits), h = (double)mt_bf16_to_f32(high[i]);
        if (!isfinite(x) || !isfinite(h)) continue;
        double down = (double)mt_f32_from_bits(bits & 0xffff0000u), up = 2 * down - h;
        if (h == down) up = (double)mt_bf16_to_f32((uint16_t)(high[i] + 1));
        if (isfinite(up)) assert_true(fabs(x - h) <= fabs(x - up));
        if (lows[i % LOWS] == 0x8000) assert_true(fabs(h) > fabs(x));
    }
    assert_ok(mt_join_master(
        &stream, &(struct mt_join_master_args){
                     .dtype = MT_F32, .count = COUNT, .y = y, .high = high, .low = low }));
    for (uint32_t i = 0; i < COUNT; i++) {
        uint32_t bits = i / LOWS << 16 | lows[i % LOWS];
        assert_int_equal(mt_f32_bits(y[i]), (bits & 0x7fffffff) > 0x7f800000 ? 0x7fff0000 : bits);
    }
    test_free(high), test_free(low), test_free(y);
}

/* A master that is NaN, or that an update makes NaN, is NaN in its bf16 half: of the patterns that
 * processors make of it some would round up to a zero. Its neighbours are as they were. */
static void test_nan_stays_nan(void **state)
{
    (void)state;
    enum { COUNT = 261 };
    mt_stream stream = on_threads(1);
    uint16_t *high = test_alloc(COUNT, MT_U16);
    int16_t *low = test_alloc(COUNT, MT_U16);
    float *m = test_alloc(COUNT, MT_F32), *v = test_alloc(COUNT, MT_F32);
    float *grad = test_alloc(COUNT, MT_F32);
    struct mt_step_state *step = test_alloc(sizeof *step, MT_U8);
    *step = (struct mt_step_state){ .lr = 1, .clip = 1, .bias1 = 0.1, .bias2 = 0.1 };
    for (int i = 0; i < COUNT; i++) {
        high[i] = 0x3f80, low[i] = (int16_t)i, m[i] = v[i] = 0, grad[i] = i % 3 == 1 ? NAN : 1;
        if (i % 3) continue; /* 0x7fffffff, of which 0x8000, -1 are the halves, ... */
        high[i] = i % 2 ? 0x8000 : 0xffff, low[i] = i % 2 ? -1 : i % 4 ? 0x7fff : 1;
    }
    assert_ok(mt_adamw(&stream, &(struct mt_adamw_args){ .dtype = MT_F32,
                                                         .count = COUNT,
                                                         .beta1 = 0.9,
                                                         .beta2 = 0.9,
                                                         .eps = 1e-8,
                                                         .master = MT_MASTER_SPLIT,
                                                         .p = high,
                                                         .p_low = low,
                                                         .m = m,
                                                         .v = v,
                                                         .grad = grad,
                                                         .state = step }));
    assert_ok(mt_device_synchronize(stream.device));
    for (int i = 0; i < COUNT; i++)
        if (i % 3 == 2)
            assert_true(isfinite(mt_bf16_to_f32(high[i])));
        else
            assert_true(high[i] == 0x7fff && low[i] == 0);
    void *all[] = { high, low, m, v, grad, step };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) test_free(all[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_master_is_lossless),
        cmocka_unit_test(test_nan_stays_nan),
    };
    return cmocka_run_group_tests(tests, open_devices, close_devices);
}
