/* Runs ./mixtape as a child in a temporary directory: what the tests of the program share. */
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tests/support/test.h"
#include "tests/train/folder.h"

#include "train/cli.h"
#include "train/fileio.h"

enum { PROGRAM_ARGS = 64, PROGRAM_OUTPUT = 1 << 18 };

static char program_path[4096], program_dir[4096], program_text[PROGRAM_OUTPUT];

/* The program is two folders above this test: build/<config>/mixtape. Tests work in a directory of
 * their own. */
static inline int program_setup(void **state)
{
    (void)state;
    ssize_t n = readlink("/proc/self/exe", program_path, sizeof program_path - 16);
    assert_true(n > 0);
    program_path[n] = '\0';
    for (int i = 0; i < 3; i++) *strrchr(program_path, '/') = '\0';
    strcat(program_path, "/mixtape");
    if (access(program_path, X_OK) != 0) fail_msg("no program %s", program_path);
    folder_make(program_dir, sizeof program_dir);
    assert_int_equal(chdir(program_dir), 0);
    return 0;
}

static inline int program_teardown(void **state)
{
    (void)state;
    assert_int_equal(chdir("/"), 0);
    assert_ok(mt_dir_remove(program_dir));
    return 0;
}

static inline void write_file(const char *path, const char *text)
{
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(text, file);
    assert_int_equal(fclose(file), 0);
}

static inline void nap(double seconds)
{
    struct timespec t = { (time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9) };
    nanosleep(&t, NULL);
}

/* Starts `mixtape` with the words of `line` (separated by single spaces), output to the file `out`.
 * `file_limit`: most bytes of any file it writes, 0 for none, as a full disk would have it. */
static inline pid_t program_start(const char *line, const char *threads, long file_limit)
{
    static char words[8192];
    char *argv[PROGRAM_ARGS] = { program_path };
    int argc = 1;
    snprintf(words, sizeof words, "%s", line);
    for (char *word = strtok(words, " "); word; word = strtok(NULL, " ")) argv[argc++] = word;
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child > 0) return child;
    int out = open("out", O_WRONLY | O_CREAT | O_TRUNC, 0666);
    dup2(out, 1);
    dup2(out, 2);
    setenv("OMP_NUM_THREADS", threads, 1);
    unsetenv("OMP_WAIT_POLICY"); /* tests/run.sh's: the program has its own */
    if (file_limit) {
        struct rlimit limit = { (rlim_t)file_limit, (rlim_t)file_limit };
        signal(SIGXFSZ, SIG_DFL); /* the program's own matter */
        setrlimit(RLIMIT_FSIZE, &limit);
    }
    execv(program_path, argv);
    _exit(127);
}

/* Waits for the child: its exit code, or 1000 + the signal that ended it; what it wrote is in
 * program_text. */
static inline int program_wait(pid_t child)
{
    int status;
    while (waitpid(child, &status, 0) < 0) assert_int_equal(errno, EINTR);
    FILE *file = fopen("out", "r");
    assert_non_null(file);
    program_text[fread(program_text, 1, sizeof program_text - 1, file)] = '\0';
    fclose(file);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

static inline int program(const char *line)
{
    return program_wait(program_start(line, "1", 0));
}

/* Asserts the exit code, and words of the output. */
static inline void assert_program(const char *line, int code, const char *words)
{
    int got = program(line);
    if (got != code || !strstr(program_text, words)) {
        print_error("mixtape %s\nexit code %d, want %d with '%s'; it wrote:\n%s\n", line, got, code,
                    words, program_text);
        fail_msg("mixtape %s", line);
    }
}
