/* Doubling. */
#include "core/array.h"

#include <stdlib.h>
#include <string.h>

mt_status mt_array_reserve(void *array, int64_t *room, int64_t count, size_t element,
                           const char *what)
{
    enum { LEAST = 16 };
    void *items;
    if (count <= *room) return MT_OK;
    int64_t grown = *room * 2 > count ? *room * 2 : count > LEAST ? count : LEAST;
    memcpy(&items, array, sizeof items);
    items = realloc(items, (size_t)grown * element);
    MT_REQUIRE(items, MT_ENOMEM, "no memory for %lld %s", (long long)grown, what);
    memcpy(array, &items, sizeof items);
    *room = grown;
    return MT_OK;
}
