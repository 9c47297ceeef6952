#include "train/json.h"

#include <stdbool.h>

static json_malloc_t beneath; /* who allocates */
static _Thread_local bool starved;

static void *allocate(size_t bytes)
{
    void *p = beneath(bytes);
    starved |= !p;
    return p;
}

mt_status mt_json_parse(json_t **json, const char *text, size_t bytes, size_t flags,
                        json_error_t *error)
{
    json_malloc_t now;
    json_free_t frees;
    json_get_alloc_funcs(&now, &frees);
    if (now != allocate) {
        beneath = now;
        json_set_alloc_funcs(allocate, frees);
    }
    starved = false;
    *json = json_loadb(text, bytes, flags, error);
    MT_REQUIRE(*json || !starved, MT_ENOMEM, "no memory for %zu bytes of JSON", bytes);
    return MT_OK;
}
