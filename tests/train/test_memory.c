/* Everything that opens, packs, imports or saves, with every single allocation failing in turn: an
 * error that says so, nothing left open, nothing left half-made. */
#include <dirent.h>

#include "tests/support/fault.h"
#include "tests/train/files.h"
#include "train/checkpoint.h"
#include "train/corpus.h"
#include "train/h5.h"
#include "train/hf.h"
#include "train/safetensors.h"

static mt_status pack(void)
{
    const char *input = in_dir("text");
    mt_corpus_pack_result r;
    const mt_corpus_pack_args args = { .inputs = &input,
                                       .input_count = 1,
                                       .output = in_dir("train.h5"),
                                       .valid_output = in_dir("valid.h5"),
                                       .split = "tail:3" };
    return mt_corpus_pack(&r, &args);
}

static mt_status open_corpus(void)
{
    mt_corpus *corpus;
    mt_status status = mt_corpus_open(&corpus, in_dir("train.h5"));
    assert_int_equal(status == MT_OK, corpus != NULL);
    mt_corpus_close(&corpus);
    return status;
}

static mt_status list_group(void)
{
    mt_h5 *file;
    char **names;
    int64_t count;
    MT_TRY(mt_h5_open(&file, in_dir("train.h5")));
    mt_status status = mt_h5_list(file, "/", &names, &count);
    mt_h5_names_free(&names, count);
    mt_h5_close(&file);
    return status;
}

/* A random model, saved and read back through both of its forms. */
static mt_status save_model(void)
{
    const mt_architecture *architecture;
    mt_model_config config;
    mt_model *model = NULL;
    mt_status status;
    MT_TRY_CLEANUP(mt_architecture_find(&architecture, "qwen3_moe"));
    mt_model_config_defaults(&config, architecture);
    config.vocab_size = 20, config.hidden_size = 8, config.num_hidden_layers = 1;
    config.num_attention_heads = 2, config.num_experts = 2, config.num_experts_per_tok = 1;
    config.moe_intermediate_size = 4;
    MT_TRY_CLEANUP(mt_model_create(&model, test_device(), &config, MT_F32, 4, false, NULL));
    MT_TRY_CLEANUP(mt_model_init(model, 1));
    const mt_checkpoint_state state = { .config = mt_model_get_config(model),
                                        .params = mt_model_params(model) };
    const mt_checkpoint_info info = { .run_config = "text" };
    MT_TRY_CLEANUP(mt_checkpoint_write(in_dir("saved"), &state, &info));
cleanup:
    if (model) mt_model_destroy(&model);
    return status;
}

static mt_status open_checkpoint(void)
{
    mt_checkpoint *checkpoint;
    mt_status status = mt_checkpoint_open(&checkpoint, in_dir("saved"));
    assert_int_equal(status == MT_OK, checkpoint != NULL);
    mt_checkpoint_close(&checkpoint);
    return status;
}

static mt_status load_model(void)
{
    mt_model_config config;
    mt_model *model;
    MT_TRY(mt_checkpoint_read_model_config(in_dir("saved"), &config));
    MT_TRY(mt_model_create(&model, test_device(), &config, MT_F64, 4, false, NULL));
    mt_status status = mt_checkpoint_load_model(model, in_dir("saved"));
    mt_model_destroy(&model);
    return status;
}

static mt_status export_model(void)
{
    mt_hf_left_out left;
    return mt_hf_export(in_dir("exported"), in_dir("saved"), 700, &left);
}

static mt_status open_tensors(void)
{
    mt_safetensors *set;
    mt_status status = mt_safetensors_open_dir(&set, in_dir("exported"));
    assert_int_equal(status == MT_OK, set != NULL);
    mt_safetensors_close(&set);
    return status;
}

static mt_status import_model(void)
{
    mt_status status = mt_hf_import(in_dir("imported"), in_dir("exported"));
    assert_false(mt_path_exists(in_dir("imported.tmp")));
    return status;
}

static int open_files(void)
{
    int count = 0;
    DIR *d = opendir("/proc/self/fd");
    if (!d) return 0;
    while (readdir(d)) count++;
    closedir(d);
    return count;
}

static void test_sweep(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        mt_status (*run)(void);
    } cases[] = { { "pack", pack },
                  { "open_corpus", open_corpus },
                  { "list_group", list_group },
                  { "save_model", save_model },
                  { "open_checkpoint", open_checkpoint },
                  { "load_model", load_model },
                  { "export_model", export_model },
                  { "open_tensors", open_tensors },
                  { "import_model", import_model } };
    put_text(in_dir("text"), "In the beginning God created the heaven and the earth.");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_ok(cases[i].run()); /* what stays is made once */
        int files = open_files();
        for (int64_t n = 1;; n++) {
            fault_arm(n, FAULT_ONCE);
            mt_status status = cases[i].run();
            if (!fault_disarm()) {
                assert_ok(status);
                assert_true(n > 1);
                break;
            }
            if (status != MT_ENOMEM)
                fail_msg("%s, allocation %lld: %s: %s", cases[i].name, (long long)n,
                         mt_status_name(status), mt_error_message());
        }
        assert_int_equal(open_files(), files);
        assert_ok(cases[i].run());
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_sweep) };
    return cmocka_run_group_tests(tests, files_setup, files_teardown);
}
