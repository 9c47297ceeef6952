/* DONE: what makes a checkpoint whole, the size and the checksum of each of its files. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <xxhash.h>

#include "train/checkpoint_priv.h"

static const char done_title[] = "mixtape checkpoint "; /* and the version */
enum { MAX_DONE = 1 << 20, MAX_NAME = 255, MAX_HEAD = 64 };

/* The line that guards all lines before it. */
static int guard_line(char line[64], const char *text, size_t bytes)
{
    return snprintf(line, 64, "end %016llx\n", (unsigned long long)XXH3_64bits(text, bytes));
}

/* Whether a file that is not what DONE says is a rank's of another save: an error that says so. */
static mt_status check_foreign(const char *dir, const char *path)
{
    char model[MT_PATH_BYTES];
    mt_h5 *file = NULL, *whole = NULL;
    mt_status status = mt_path_format(model, "%s/model.h5", dir);
    if (status == MT_OK && mt_h5_open(&whole, model) == MT_OK && mt_h5_open(&file, path) == MT_OK)
        status = mt_h5_check_set(whole, file);
    mt_h5_close(&file);
    mt_h5_close(&whole);
    return status;
}

/* A directory, or a device, under a file's name is no file that cannot be read just now. */
static mt_status check_file(const char *path)
{
    struct stat st;
    MT_REQUIRE(stat(path, &st) != 0 || S_ISREG(st.st_mode), MT_EDAMAGED,
               "'%s' is not a regular file", path);
    return MT_OK;
}

/* One line "size hash name" against the file. */
static mt_status verify_line(const char *dir, const char *line)
{
    char path[MT_PATH_BYTES], want[MT_HEX128_BYTES], got[MT_HEX128_BYTES], name[MAX_NAME + 1];
    long long size;
    int64_t bytes;
    bool there;
    MT_REQUIRE(sscanf(line, "%lld %32[0-9a-f] %255[^/\n]", &size, want, name) == 3 &&
                   name[0] != '.',
               MT_EDAMAGED, "'%s/DONE': the line '%.80s' is not 'size hash name'", dir, line);
    MT_TRY(mt_path_format(path, "%s/%s", dir, name));
    MT_TRY(mt_path_look(&there, path));
    MT_REQUIRE(there, MT_EDAMAGED, "'%s', which DONE names: %s", path, strerror(ENOENT));
    MT_TRY(check_file(path));
    MT_TRY(mt_file_xxh128(got, &bytes, path));
    if (bytes == size && !strcmp(got, want)) return MT_OK;
    MT_TRY(check_foreign(dir, path));
    MT_REQUIRE(bytes == size, MT_EDAMAGED, "'%s' has %lld bytes, DONE says %lld", path,
               (long long)bytes, size);
    return MT_FAIL(MT_EDAMAGED, "'%s' does not match its checksum in DONE", path);
}

/* The version that the first line names; 0: it is no first line. */
static int64_t version_of(const char *text)
{
    char *end;
    const char *number = text + sizeof done_title - 1;
    if (strncmp(text, done_title, sizeof done_title - 1) || *number < '1' || *number > '9')
        return 0;
    long long version = strtoll(number, &end, 10);
    return *end == '\n' ? version : 0;
}

/* Verifies line `share` of every `shares`, counting from 0. Of every version the first line names
 * it and the last guards all before it: what is whole and newer is not damaged. */
static mt_status verify_done(const char *dir, const char *text, int share, int shares,
                             int64_t *files)
{
    char guard[64];
    int64_t version = version_of(text);
    const char *end = strstr(text, "\nend ");
    MT_REQUIRE(version && end, MT_EDAMAGED, "'%s/DONE' is not whole", dir);
    guard_line(guard, text, (size_t)(end + 1 - text));
    MT_REQUIRE(!strcmp(end + 1, guard), MT_EDAMAGED, "'%s/DONE' does not match its own checksum",
               dir);
    MT_REQUIRE(version <= MT_CHECKPOINT_VERSION, MT_EUNSUPPORTED,
               "'%s' was written by a newer version: its DONE is of version %lld, this program "
               "reads %d",
               dir, (long long)version, MT_CHECKPOINT_VERSION);
    *files = 0;
    for (const char *line = strchr(text, '\n') + 1; line <= end; line = strchr(line, '\n') + 1)
        if ((*files)++ % shares == share) MT_TRY(verify_line(dir, line));
    return MT_OK;
}

static mt_status verify_share(const char *path, int share, int shares, int64_t *files)
{
    char done[MT_PATH_BYTES], *text;
    size_t bytes;
    bool there;
    MT_TRY(mt_path_format(done, "%s/DONE", path));
    MT_TRY(mt_path_look(&there, path));
    MT_REQUIRE(there, MT_EIO, "there is no checkpoint '%s'", path);
    MT_TRY(mt_path_look(&there, done));
    MT_REQUIRE(there, MT_EDAMAGED, "'%s' has no DONE: not a checkpoint, or not a complete one",
               path);
    MT_TRY(check_file(done));
    MT_TRY(mt_file_read_all(&text, &bytes, done, MAX_DONE));
    mt_status status = verify_done(path, text, share, shares, files);
    free(text);
    return status == MT_OK ? MT_OK : mt_error_pass(status, __FILE__, __LINE__);
}

mt_status mt_checkpoint_write_done(const char *dir, const mt_checkpoint_seal *seals, int count)
{
    enum { LINE = 32 + MT_HEX128_BYTES + MT_SEAL_NAME };
    char path[MT_PATH_BYTES], guard[64];
    size_t room = MAX_HEAD + (size_t)count * LINE + sizeof guard, used;
    char *text = malloc(room);
    MT_REQUIRE(text, MT_ENOMEM, "no memory for a DONE of %zu bytes", room);
    used = (size_t)snprintf(text, room, "%s%d\n", done_title, MT_CHECKPOINT_VERSION);
    for (int i = 0; i < count; i++)
        used += (size_t)snprintf(text + used, room - used, "%lld %s %s\n",
                                 (long long)seals[i].bytes, seals[i].hex, seals[i].name);
    used +=
        (size_t)snprintf(text + used, room - used, "%s", (guard_line(guard, text, used), guard));
    mt_status status = mt_path_format(path, "%s/DONE", dir);
    if (status == MT_OK) status = mt_file_write_all(path, text, used);
    free(text);
    return status;
}

mt_status mt_checkpoint_verify(const char *path, mt_comm *comm, int64_t *files)
{
    return mt_comm_agree(comm, verify_share(path, mt_comm_rank(comm), mt_comm_size(comm), files),
                         "verifying a checkpoint");
}
