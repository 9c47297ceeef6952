/* Fuzzes the configuration parser: any bytes as a file, and what follows a NUL as one --set. What
 * is accepted must be written back and read again to the same values. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "train/config.h"

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size);

static void check_round_trip(const mt_config *config)
{
    static char x[MT_CONFIG_FORMATTED], y[MT_CONFIG_FORMATTED];
    char *text = NULL;
    if (mt_config_text(&text, config) != MT_OK) return;
    mt_config again;
    if (mt_config_parse(&again, "again", text, strlen(text), NULL, 0) != MT_OK) {
        fprintf(stderr, "not read back: %s\n%s\n", mt_error_message(), text);
        abort();
    }
    for (int i = 0; i < mt_config_key_count; i++) {
        mt_config_format(x, config, &mt_config_keys[i]);
        mt_config_format(y, &again, &mt_config_keys[i]);
        if (strcmp(x, y) != 0) {
            fprintf(stderr, "%s: %s became %s\n", mt_config_keys[i].path, x, y);
            abort();
        }
    }
    free(text);
}

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size)
{
    mt_config config;
    const unsigned char *nul = memchr(data, 0, size);
    size_t length = nul ? (size_t)(nul - data) : size;
    char *set = nul ? strndup((const char *)nul + 1, size - length - 1) : NULL;
    mt_status status = mt_config_parse(&config, "fuzz", (const char *)data, length,
                                       (const char *const *)&set, set ? 1 : 0);
    if (status == MT_OK) check_round_trip(&config);
    free(set);
    return 0;
}
