/* Edit distance between names; numbers that fit. */
#include "train/nearest.h"

#include <stdio.h>
#include <string.h>

enum { NAME_MAX_LENGTH = 63 };

/* Optimal string alignment distance: insertions, deletions, substitutions, swapped neighbours. */
static int edit_distance(const char *a, const char *b)
{
    int n = (int)strlen(a), m = (int)strlen(b);
    if (n > NAME_MAX_LENGTH || m > NAME_MAX_LENGTH) return NAME_MAX_LENGTH;
    int rows[3][NAME_MAX_LENGTH + 1];
    int *before = rows[0], *last = rows[1], *now = rows[2];
    for (int j = 0; j <= m; j++) last[j] = j;
    for (int i = 1; i <= n; i++) {
        now[0] = i;
        for (int j = 1; j <= m; j++) {
            int best = last[j - 1] + (a[i - 1] != b[j - 1]);
            if (last[j] + 1 < best) best = last[j] + 1;
            if (now[j - 1] + 1 < best) best = now[j - 1] + 1;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] &&
                before[j - 2] + 1 < best)
                best = before[j - 2] + 1;
            now[j] = best;
        }
        int *free_row = before;
        before = last, last = now, now = free_row;
    }
    return last[m];
}

const char *mt_nearest(const char *text, const void *names, int count, size_t stride)
{
    const char *best = NULL;
    int least = (int)strlen(text) / 3 + 2; /* further away is no likeness */
    for (int i = 0; i < count; i++) {
        const char *name;
        memcpy(&name, (const char *)names + (size_t)i * stride, sizeof name);
        int distance = edit_distance(text, name);
        if (distance < least) least = distance, best = name;
    }
    return best;
}

void mt_nearest_numbers(char text[MT_NEAREST_NUMBERS], int64_t x, int64_t most,
                        bool (*fits)(void *context, int64_t n), void *context)
{
    int64_t below = x < most ? x : most, above = x > 1 ? x : 1;
    while (below >= 1 && !fits(context, below)) below--;
    while (above <= most && !fits(context, above)) above++;
    *text = '\0';
    if (below >= 1 && above <= most && above != below)
        snprintf(text, MT_NEAREST_NUMBERS, "%lld or %lld", (long long)below, (long long)above);
    else if (below >= 1 || above <= most)
        snprintf(text, MT_NEAREST_NUMBERS, "%lld", (long long)(below >= 1 ? below : above));
}
