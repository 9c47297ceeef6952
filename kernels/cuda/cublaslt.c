/* The cuBLASLt library: where it is found, which version it is, what it says of errors. */
#include "kernels/cuda/cublaslt_priv.h"

#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PATH = 512 };

/* ---- declarations that are ours ----------------------------------------------------------------
 */

#if CUBLAS_VERSION >= 130400
#define SAME(ours, theirs) _Static_assert((int)(ours) == (int)(theirs), #theirs)
SAME(MT_LT_PREFERENCE_AVERAGE_DEPTH, CUBLASLT_MATMUL_PREF_GROUPED_AVERAGE_REDUCTION_DIM);
SAME(MT_LT_PREFERENCE_AVERAGE_ROWS, CUBLASLT_MATMUL_PREF_GROUPED_DESC_D_AVERAGE_ROWS);
SAME(MT_LT_PREFERENCE_AVERAGE_COLS, CUBLASLT_MATMUL_PREF_GROUPED_DESC_D_AVERAGE_COLS);
/* Extents are int32, which is what a layout has unless it is told otherwise. */
SAME(0, CUBLASLT_INTEGER_WIDTH_32);
_Static_assert(_Generic(&cublasLtGroupedMatrixLayoutInit_internal, mt_lt_grouped_init : 1,
                        default : 0),
               "cublasLtGroupedMatrixLayoutInit_internal");
#endif
_Static_assert(sizeof(mt_lt_descriptor) >= sizeof(cublasLtMatrixLayoutOpaque_t), "layouts");
_Static_assert(sizeof(mt_lt_descriptor) >= sizeof(cublasLtMatmulPreferenceOpaque_t), "preferences");

/* ---- loading -----------------------------------------------------------------------------------
 */

static const struct symbol {
    const char *name;
    size_t at; /* in struct mt_cublaslt */
} symbols[] = {
#define SYMBOL(name) { "cublasLt" #name, offsetof(struct mt_cublaslt, name) },
    MT_LT_CALLS(SYMBOL)
#undef SYMBOL
};
enum { SYMBOLS = sizeof symbols / sizeof *symbols };

static const char soname[] = "libcublasLt.so.13";

/* The i-th place to look; false past the last. */
static bool place(char path[PATH], int i)
{
    const char *named = getenv("MIXTAPE_CUBLASLT"), *home = getenv("CUDA_HOME");
    const char *roots[] = { home && *home ? home : "/usr/local/cuda", "/usr/local/cuda" };
    if (named && *named) return i == 0 && snprintf(path, PATH, "%s", named) < PATH;
    if (i == 0) return snprintf(path, PATH, "%s", soname) < PATH;
    return i <= 2 && snprintf(path, PATH, "%s/lib64/%s", roots[i - 1], soname) < PATH;
}

static mt_status load(void **library, char path[PATH])
{
    char reason[PATH] = "its path is too long";
    *library = NULL;
    for (int i = 0; !*library && place(path, i); i++) {
        *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        const char *error = *library ? NULL : dlerror();
        if (i == 0 && error) snprintf(reason, sizeof reason, "%s", error);
    }
    MT_REQUIRE(*library, MT_EDEVICE, "cuBLASLt: %s (MIXTAPE_CUBLASLT names the library to load)",
               reason);
    return MT_OK;
}

static mt_status find_symbols(mt_cublaslt *lt, void *library, const char *path)
{
    for (int i = 0; i < SYMBOLS; i++) {
        void *p = dlsym(library, symbols[i].name);
        MT_REQUIRE(p, MT_EDEVICE, "cuBLASLt: %s has no %s", path, symbols[i].name);
        memcpy((char *)lt + symbols[i].at, &p, sizeof p);
    }
    void *grouped = dlsym(library, "cublasLtGroupedMatrixLayoutInit_internal");
    memcpy(&lt->GroupedMatrixLayoutInit_internal, &grouped, sizeof grouped);
    return MT_OK;
}

/* ---- the version and what it allows ------------------------------------------------------------
 */

static void describe(mt_cublaslt *lt, size_t version)
{
    /* and what cuBLASLt leaves to the kernels behind it (gemm_cublaslt.c) */
    static const char *const how[] = {
        [MT_LT_OURS] = "; ragged rows, biases, scales of whole members",
        [MT_LT_GROUPED] = ", grouped; biases, scales of whole members, lines not of 16 bytes",
        [MT_LT_LOOP] = ", a call per member; biases",
    };
    snprintf(lt->text, sizeof lt->text, "cuBLASLt %zu.%zu.%zu%s", version / 10000,
             version / 100 % 100, version % 100, how[lt->groups]);
}

static mt_status check_version(const mt_cublaslt *lt, const char *path, int capability)
{
    size_t version = lt->GetVersion();
    bool grouped = lt->groups == MT_LT_GROUPED;
    MT_REQUIRE(!grouped || mt_lt_has_grouped(version, capability), MT_EDEVICE,
               "cuBLASLt: grouped GEMM needs version %d.%d and compute capability %d.%d to %d.x: "
               "%s is version %zu.%zu.%zu, and this card %d.%d",
               MT_LT_GROUPED_SINCE / 10000, MT_LT_GROUPED_SINCE / 100 % 100,
               MT_LT_GROUPED_LEAST / 10, MT_LT_GROUPED_LEAST % 10, MT_LT_GROUPED_MOST / 10, path,
               version / 10000, version / 100 % 100, version % 100, capability / 10,
               capability % 10);
    MT_REQUIRE(!grouped || lt->GroupedMatrixLayoutInit_internal, MT_EDEVICE,
               "cuBLASLt: %s has no cublasLtGroupedMatrixLayoutInit_internal", path);
    return MT_OK;
}

mt_status mt_lt_error(const mt_cublaslt *lt, cublasStatus_t status, const char *call,
                      const char *file, int line)
{
    return mt_error_set(status == CUBLAS_STATUS_ALLOC_FAILED ? MT_ENOMEM : MT_EDEVICE, file, line,
                        "cuBLASLt: %s: %s", call, lt->GetStatusName(status));
}

/* ---- opening and closing -----------------------------------------------------------------------
 */

static mt_status open_loop(mt_cublaslt *lt)
{
    MT_CUDA(cudaEventCreateWithFlags(&lt->fork, cudaEventDisableTiming));
    for (int i = 0; i < MT_LT_STREAMS; i++) {
        MT_CUDA(cudaEventCreateWithFlags(&lt->joined[i], cudaEventDisableTiming));
        MT_CUDA(cudaStreamCreateWithFlags(&lt->streams[i], cudaStreamNonBlocking));
    }
    return MT_OK;
}

static mt_status open_library(mt_cublaslt *lt, int capability)
{
    void *library;
    char path[PATH];
    MT_TRY(load(&library, path));
    MT_TRY(find_symbols(lt, library, path));
    MT_TRY(check_version(lt, path, capability));
    describe(lt, lt->GetVersion());
    MT_LT(lt, Create(&lt->handle));
    MT_CUDA(cudaMalloc(&lt->workspace, mt_cublaslt_bytes(lt)));
    return lt->groups == MT_LT_LOOP ? open_loop(lt) : MT_OK;
}

mt_status mt_cublaslt_open(mt_cublaslt **lt, mt_lt_groups groups, int capability)
{
    *lt = calloc(1, sizeof **lt);
    MT_REQUIRE(*lt, MT_ENOMEM, "cuBLASLt: no %zu bytes for its calls", sizeof **lt);
    (*lt)->groups = groups;
    mt_status status = open_library(*lt, capability);
    if (status != MT_OK) mt_cublaslt_close(lt);
    return status;
}

/* The library stays loaded: the context may still hold its kernels. */
void mt_cublaslt_close(mt_cublaslt **lt)
{
    mt_cublaslt *l = *lt;
    if (!l) return;
    for (int i = 0; i < MT_LT_STREAMS; i++) {
        if (l->streams[i]) (void)cudaStreamDestroy(l->streams[i]);
        if (l->joined[i]) (void)cudaEventDestroy(l->joined[i]);
    }
    if (l->fork) (void)cudaEventDestroy(l->fork);
    if (l->handle) (void)l->Destroy(l->handle);
    if (l->workspace) (void)cudaFree(l->workspace);
    free(l->parts), free(l->first_dims), free(l->offsets);
    for (int i = 0; i < 2; i++) free(l->scales[i]);
    free(l);
    *lt = NULL;
}

const char *mt_cublaslt_text(const mt_cublaslt *lt)
{
    return lt->text;
}

mt_lt_groups mt_cublaslt_groups(const mt_cublaslt *lt)
{
    return lt->groups;
}

size_t mt_cublaslt_workspace(mt_lt_groups groups)
{
    return (size_t)MT_LT_WORKSPACE * (groups == MT_LT_LOOP ? MT_LT_STREAMS : 1);
}

size_t mt_cublaslt_bytes(const mt_cublaslt *lt)
{
    return mt_cublaslt_workspace(lt->groups);
}
