/* The bar is drawn at most ten times a second. */
#include "train/progress.h"

#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "core/clock.h"

enum { BAR = 24 };

void mt_progress_begin(mt_progress *progress, int64_t first_step, int64_t steps)
{
    /* mpirun gives each rank a terminal as standard output, whatever its own is; never as error */
    *progress = (mt_progress){ .terminal = isatty(STDOUT_FILENO) == 1 && isatty(STDERR_FILENO) == 1,
                               .first_step = first_step,
                               .steps = steps,
                               .began = mt_now() };
    if (!progress->terminal) setvbuf(stdout, NULL, _IOLBF, 0);
}

/* "1:02:03" or "2:03" */
static void format_time(char text[32], double seconds)
{
    long s = (long)(seconds + 0.5);
    if (s >= 3600)
        snprintf(text, 32, "%ld:%02ld:%02ld", s / 3600, s / 60 % 60, s % 60);
    else
        snprintf(text, 32, "%ld:%02ld", s / 60, s % 60);
}

static void format_left(char text[32], const mt_progress *p, int64_t step, double now)
{
    int64_t made = step - p->first_step, left = p->steps - step;
    format_time(text, made > 0 ? (now - p->began) / (double)made * (double)left : 0);
}

/* What a line may have without wrapping. */
static int line_room(void)
{
    struct winsize size;
    bool known = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
    return known ? size.ws_col - 1 : INT_MAX;
}

/* "MFU 46.1 %  ", or nothing */
static void format_mfu(char text[32], const mt_metrics_step *line)
{
    *text = '\0';
    if (line->mfu > 0) snprintf(text, 32, "MFU %.1f %%  ", line->mfu * 100);
}

/* Where the line is too narrow, first the bar is shorter, then the end is cut: the time left is
 * not there. */
static void draw_bar(mt_progress *p, const mt_metrics_step *line, double now)
{
    char left[32], mfu[32], text[512];
    format_left(left, p, line->step, now), format_mfu(mfu, line);
    snprintf(text, sizeof text,
             "%lld/%lld  %s left  loss %.4f  lr %.1e  grad %.2f  %.0f tok/s  %sMaxVio %.2f  "
             "dropped %lld",
             (long long)line->step, (long long)p->steps, left, line->loss, line->lr,
             line->grad_norm, line->tokens_per_second, mfu, line->max_vio,
             (long long)line->dropped);
    int room = line_room(), bar = room - (int)strlen(text) - 3; /* brackets and a space */
    if (bar > BAR) bar = BAR;
    int full = p->steps ? (int)(line->step * bar / p->steps) : bar;
    putchar('\r');
    if (bar > 0) printf("[%.*s%*s] ", full, "########################", bar - full, "");
    printf("%.*s\x1b[K", room, text);
    fflush(stdout);
    p->bar_drawn = true;
    p->drawn = now;
}

/* "ranks 0.211-0.304 s (3), 512-530 MB (0)  " */
static void format_ranks(char text[96], const mt_metrics_ranks *r)
{
    *text = '\0';
    if (r->ranks > 1)
        snprintf(text, 96, "ranks %.3f-%.3f s (%d), %.0f-%.0f MB (%d)  ", r->fastest_seconds,
                 r->slowest_seconds, r->slowest, (double)r->least_bytes / 1e6,
                 (double)r->most_bytes / 1e6, r->fullest);
}

static void print_line(const mt_progress *p, const mt_metrics_step *line, double now)
{
    char left[32], ranks[96], mfu[32];
    format_ranks(ranks, &line->ranks), format_mfu(mfu, line);
    format_left(left, p, line->step, now);
    printf("step %lld/%lld  loss %.4f  aux %.4f  grad %.3f  lr %.2e  %.0f tok/s  %s%.0f MB  MaxVio "
           "%.2f  dropped %lld  %s%s left\n",
           (long long)line->step, (long long)p->steps, line->loss, line->aux_loss, line->grad_norm,
           line->lr, line->tokens_per_second, mfu, (double)line->memory_bytes / 1e6, line->max_vio,
           (long long)line->dropped, ranks, left);
}

void mt_progress_step(mt_progress *p, const mt_metrics_step *line, bool interval)
{
    double now = mt_now();
    if (p->silent) return;
    if (!p->terminal && interval)
        print_line(p, line, now);
    else if (p->terminal && (now - p->drawn >= 0.1 || line->step == p->steps))
        draw_bar(p, line, now);
}

void mt_progress_note(mt_progress *p, const char *format, ...)
{
    if (p->silent) return;
    if (p->bar_drawn) printf("\r\x1b[K");
    p->bar_drawn = false;
    p->drawn = 0;
    va_list args;
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    putchar('\n');
    fflush(stdout);
}

void mt_progress_end(mt_progress *p)
{
    if (p->bar_drawn) putchar('\n');
    p->bar_drawn = false;
    fflush(stdout);
}
