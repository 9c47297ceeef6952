/* A comparison for other programs and as a picture. */
#include "train/compare.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "train/fileio.h"

enum { PATH_SHOWN = 300 };

/* ---- JSON and CSV ------------------------------------------------------------------------------
 */

/* A number, or null: JSON has no NaN. */
static json_t *real_or_null(double x)
{
    return isfinite(x) ? json_real(x) : json_null();
}

/* As the runs' metrics have it: "valid_bits_per_byte". */
static void name_bits(char name[32], const mt_comparison *c)
{
    snprintf(name, 32, "valid_bits_per_%s", c->runs[0].unit);
}

static json_t *json_of_changes(const mt_compare_run *run)
{
    json_t *changes = json_array();
    for (int64_t i = 0; i < run->changes.count; i++) {
        const mt_change *x = &run->changes.items[i];
        if (mt_compare_change_counts(run, x))
            json_array_append_new(changes,
                                  json_pack("{s:I, s:s, s:s, s:s}", "step", (json_int_t)x->step,
                                            "key", x->key, "from", x->from, "to", x->to));
    }
    return changes;
}

static json_t *json_of_runs(const mt_comparison *c, int64_t group)
{
    json_t *runs = json_array();
    char bits[32];
    name_bits(bits, c);
    for (int64_t i = mt_compare_next(c, group, -1); i >= 0; i = mt_compare_next(c, group, i)) {
        const mt_compare_run *run = &c->runs[i];
        json_array_append_new(runs, json_pack("{s:s, s:I, s:f, s:o}", "run", run->path, "seed",
                                              (json_int_t)run->config.trainer.seed, bits, run->bits,
                                              "changes", json_of_changes(run)));
    }
    return runs;
}

static json_t *json_of_group(const mt_comparison *c, int64_t g, const char *configuration)
{
    const mt_compare_group *group = &c->groups[g];
    const mt_compare_mean *d = &group->difference;
    bool base = g == c->baseline;
    char bits[32];
    name_bits(bits, c);
    return json_pack(
        "{s:I, s:s, s:o, s:f, s:I, s:o, s:o, s:s}", "group", (json_int_t)(g + 1), "configuration",
        configuration, "runs", json_of_runs(c, g), bits, group->bits, "pairs", (json_int_t)d->pairs,
        "difference", base ? json_null() : real_or_null(d->mean), "standard_error",
        real_or_null(d->error), "verdict", mt_compare_verdicts[mt_compare_judge(c, g)]);
}

static mt_status write_json(const mt_comparison *c, const char *path, FILE *file)
{
    json_t *groups = json_array();
    mt_status status = MT_OK;
    for (int64_t g = 0; g < c->group_count && status == MT_OK; g++) {
        char *configuration;
        status = mt_compare_configuration(&configuration, c, g);
        if (status != MT_OK) break;
        if (json_array_append_new(groups, json_of_group(c, g, configuration)) != 0)
            status = MT_FAIL(MT_ENOMEM, "'%.*s': no memory for JSON, or a path is not UTF-8",
                             PATH_SHOWN, path);
        free(configuration);
    }
    json_t *all =
        json_pack("{s:I, s:O}", "baseline", (json_int_t)(c->baseline + 1), "groups", groups);
    if (status == MT_OK && (!all || json_dumpf(all, file, JSON_INDENT(2)) != 0))
        status = MT_FAIL(MT_ENOMEM, "'%.*s': no memory for JSON", PATH_SHOWN, path);
    fputc('\n', file);
    json_decref(all);
    json_decref(groups);
    return status;
}

/* A text between quotation marks, those in it doubled. */
static void put_quoted(FILE *file, const char *text, char mark)
{
    fputc(mark, file);
    for (; *text; text++) {
        if (*text == mark) fputc(mark, file);
        fputc(*text, file);
    }
    fputc(mark, file);
}

static void put_real(FILE *file, double x)
{
    if (isfinite(x)) fprintf(file, "%.17g", x);
    fputc(',', file);
}

static mt_status write_csv(const mt_comparison *c, const char *path, FILE *file)
{
    (void)path;
    char bits[32];
    name_bits(bits, c);
    fprintf(file, "group,run,runs,seeds,%s,pairs,difference,standard_error,verdict,configuration\n",
            bits);
    for (int64_t g = 0; g < c->group_count; g++) {
        const mt_compare_group *group = &c->groups[g];
        char *configuration;
        MT_TRY(mt_compare_configuration(&configuration, c, g));
        fprintf(file, "%" PRId64 ",", g + 1);
        put_quoted(file, c->runs[group->first].path, '"');
        fprintf(file, ",%" PRId64 ",", group->count);
        for (int64_t i = mt_compare_next(c, g, -1); i >= 0; i = mt_compare_next(c, g, i))
            fprintf(file, "%s%" PRIu64, i == group->first ? "" : " ",
                    c->runs[i].config.trainer.seed);
        fputc(',', file);
        put_real(file, group->bits);
        fprintf(file, "%" PRId64 ",", group->difference.pairs);
        put_real(file, g == c->baseline ? (double)NAN : group->difference.mean);
        put_real(file, group->difference.error);
        fprintf(file, "%s,", mt_compare_verdicts[mt_compare_judge(c, g)]);
        put_quoted(file, configuration, '"');
        fputc('\n', file);
        free(configuration);
    }
    return MT_OK;
}

/* ---- gnuplot -----------------------------------------------------------------------------------
 */

/* The two panels of a picture: training losses, and differences to the baseline. */
enum { LOSSES, DIFFERENCES, PANELS };
static const char *const data_names[PANELS] = { "losses", "differences" };

typedef struct extent {
    double low, high;
} extent;

typedef struct panel {
    extent x, y;
    int64_t curves;
    int64_t *points; /* of each group */
} panel;

static void widen(extent *e, double low, double high)
{
    if (low < e->low) e->low = low;
    if (high > e->high) e->high = high;
}

/* Of a group at a step, in bits a token; false: nothing. Of its pairs all, so that a mean is of the
 * same ones at each step. */
static bool value_at(double *y, double *error, const mt_comparison *c, int64_t g, int which,
                     int64_t step)
{
    mt_compare_mean d = { 0 };
    *error = 0;
    if (which == DIFFERENCES) d = mt_compare_difference_at(c, g, step);
    if (d.pairs > 1) *error = d.error / log(2);
    *y = (which == DIFFERENCES ? d.mean : mt_compare_loss_at(c, g, step)) / log(2);
    return which == LOSSES ? isfinite(*y) : d.pairs && d.pairs == c->groups[g].difference.pairs;
}

/* Rows "step value low high". */
static void put_points(panel *p, const mt_comparison *c, int64_t g, int which, FILE *file)
{
    const mt_compare_run *first = &c->runs[c->groups[g].first];
    double y, error;
    fprintf(file, "$%s%" PRId64 " << END\n", data_names[which], g);
    for (int64_t i = 0; i < first->point_count; i++) {
        int64_t step = first->points[i].step;
        if (!value_at(&y, &error, c, g, which, step)) continue;
        fprintf(file, "%" PRId64 " %.9g %.9g %.9g\n", step, y, y - error, y + error);
        widen(&p->x, (double)step, (double)step);
        widen(&p->y, y - error, y + error);
        p->points[g]++;
    }
    fputs("END\n", file);
    p->curves += p->points[g] > 0;
}

/* Gnuplot warns of a range that is empty, which it then chooses itself. */
static void put_range(FILE *file, char axis, const extent *e)
{
    char low[32], high[32];
    snprintf(low, sizeof low, "%.9g", e->low);
    snprintf(high, sizeof high, "%.9g", e->high);
    if (strcmp(low, high) != 0)
        fprintf(file, "set %crange [*:*]\n", axis);
    else
        fprintf(file, "set %crange [%.9g:%.9g]\n", axis, e->low - 1, e->high + 1);
}

/* With the group's number, as the table has it. Gnuplot draws no key at all where a title is wider
 * than the picture. */
static void put_title(FILE *file, int64_t group, const char *configuration)
{
    enum { MOST = 112 };
    char title[MOST + 32];
    int length = (int)strnlen(configuration, MOST + 1);
    bool cut = length > MOST;
    if (cut) /* before a whole character of UTF-8 */
        for (length = MOST; length > 0 && (configuration[length] & 0xc0) == 0x80;) length--;
    snprintf(title, sizeof title, "%" PRId64 ": %.*s%s", group + 1, length, configuration,
             cut ? " ..." : "");
    put_quoted(file, title, '\'');
}

/* The lines of a panel, differences within bands of a standard error. What has one point is that.
 */
static mt_status put_curves(const panel *p, const mt_comparison *c, int which, FILE *file)
{
    const char *between = "plot ", *name = data_names[which];
    put_range(file, 'x', &p->x);
    put_range(file, 'y', &p->y);
    for (int64_t g = 0; g < c->group_count; g++) {
        char *title;
        if (!p->points[g]) continue;
        MT_TRY(mt_compare_configuration(&title, c, g));
        if (which == DIFFERENCES && p->points[g] > 1) {
            fprintf(file,
                    "%s$%s%" PRId64 " using 1:3:4 with filledcurves lc %" PRId64
                    " fs transparent solid 0.2 noborder notitle",
                    between, name, g, g + 1);
            between = ", ";
        }
        const char *drawn = p->points[g] > 1 ? "1:2 with lines" : "1:2:3:4 with yerrorbars pt 7";
        fprintf(file, "%s$%s%" PRId64 " using %s lw 2 lc %" PRId64 " title ", between, name, g,
                drawn, g + 1);
        put_title(file, g, *title ? title : "the runs given");
        between = ", ";
        free(title);
    }
    fputc('\n', file);
    return MT_OK;
}

static mt_status put_panels(panel panels[PANELS], const mt_comparison *c, const char *path,
                            FILE *file)
{
    for (int which = 0; which < PANELS; which++) {
        panels[which].x = panels[which].y = (extent){ (double)INFINITY, -(double)INFINITY };
        for (int64_t g = 0; g < c->group_count; g++) put_points(&panels[which], c, g, which, file);
    }
    int count = panels[DIFFERENCES].curves ? 2 : 1;
    fprintf(file, "set terminal pngcairo noenhanced size 1000,%d font \"sans,10\"\nset output ",
            count * (420 + 16 * (int)c->group_count));
    put_quoted(file, path, '\'');
    fprintf(file,
            "\nset multiplot layout %d,1\nset grid\nset xlabel \"step\" offset 0,0.6\n"
            "set linetype 9 lc rgb \"#8b5a2b\"\nset linetype 10 lc rgb \"#ff80c0\"\n"
            "set linetype 11 lc rgb \"#808080\"\nset linetype 12 lc rgb \"#80c000\"\n"
            "set linetype cycle 12\n"
            "set key outside center bottom vertical maxcols 1 Left reverse\n"
            "set ylabel \"training loss, bits a token, mean over seeds\"\n",
            count);
    if (count == 1 && c->group_count > 1)
        fputs("set title \"no differences: no step of the baseline is logged in another group\"\n",
              file);
    MT_TRY(put_curves(&panels[LOSSES], c, LOSSES, file));
    if (count == 1) return MT_OK;
    fputs("set ylabel \"difference over paired seeds, +- a standard error\"\n"
          "set xzeroaxis lc rgb \"black\"\n",
          file);
    return put_curves(&panels[DIFFERENCES], c, DIFFERENCES, file);
}

static mt_status write_script(const mt_comparison *c, const char *path, FILE *file)
{
    panel panels[PANELS] = { 0 };
    int64_t *points = calloc((size_t)(PANELS * c->group_count), sizeof *points);
    MT_REQUIRE(points, MT_ENOMEM, "compare: no memory for a picture");
    for (int which = 0; which < PANELS; which++)
        panels[which].points = points + which * c->group_count;
    mt_status status = put_panels(panels, c, path, file);
    free(points);
    return status;
}

static mt_status run_gnuplot(const char *script, const char *path)
{
    enum { NOT_STARTED = 127 }; /* where posix_spawnp learns of it only through the child */
    char *argv[] = { (char *)(uintptr_t) "gnuplot", (char *)(uintptr_t)script, NULL };
    pid_t child;
    int status, error = posix_spawnp(&child, "gnuplot", NULL, NULL, argv, environ);
    while (error == 0 && waitpid(child, &status, 0) < 0)
        MT_REQUIRE(errno == EINTR, MT_EIO, "plot: %s", strerror(errno));
    if (error == 0 && WIFEXITED(status) && WEXITSTATUS(status) == NOT_STARTED) error = ENOENT;
    MT_REQUIRE(error == 0, MT_EUNSUPPORTED, "plot: gnuplot does not start: %s", strerror(error));
    MT_REQUIRE(WIFEXITED(status) && WEXITSTATUS(status) == 0, MT_EIO,
               "the plot '%.*s' was not drawn: gnuplot failed", PATH_SHOWN, path);
    return MT_OK;
}

/* ---- files -------------------------------------------------------------------------------------
 */

/* Writes what `put` prints about `path` to the file `to`, whole or not at all. */
static mt_status write_file(const mt_comparison *c, const char *to, const char *path,
                            mt_status (*put)(const mt_comparison *c, const char *path, FILE *file))
{
    char *text = NULL;
    size_t length = 0;
    FILE *file = open_memstream(&text, &length);
    MT_REQUIRE(file, MT_ENOMEM, "compare: no memory for '%.*s'", PATH_SHOWN, to);
    mt_status status = put(c, path, file);
    bool failed = ferror(file) != 0;
    if ((fclose(file) != 0 || failed) && status == MT_OK)
        status = MT_FAIL(MT_ENOMEM, "compare: no memory for '%.*s'", PATH_SHOWN, to);
    if (status == MT_OK) status = mt_file_write_all(to, text, length);
    free(text);
    return status;
}

mt_status mt_compare_write(const mt_comparison *c, const char *path)
{
    const char *ending = strrchr(path, '.');
    bool json = ending && strcmp(ending, ".json") == 0;
    MT_REQUIRE(json || (ending && strcmp(ending, ".csv") == 0), MT_ECONFIG,
               "the table '%.*s' must end in .json or .csv", PATH_SHOWN, path);
    MT_TRY(mt_file_check_place(path));
    return write_file(c, path, path, json ? write_json : write_csv);
}

static bool has_losses(const mt_comparison *c)
{
    for (int64_t g = 0; g < c->group_count; g++) {
        const mt_compare_run *first = &c->runs[c->groups[g].first];
        for (int64_t i = 0; i < first->point_count; i++)
            if (isfinite(mt_compare_loss_at(c, g, first->points[i].step))) return true;
    }
    return false;
}

mt_status mt_compare_plot(const mt_comparison *c, const char *path)
{
    char script[MT_PATH_BYTES], image[MT_PATH_BYTES];
    const char *ending = strrchr(path, '.');
    MT_REQUIRE(ending && strcmp(ending, ".png") == 0, MT_ECONFIG,
               "the plot '%.*s' must end in .png", PATH_SHOWN, path);
    MT_REQUIRE(has_losses(c), MT_ECONFIG,
               "the plot '%.*s' would be empty: no group has a training loss of a step that all "
               "its runs have logged",
               PATH_SHOWN, path);
    MT_TRY(mt_file_check_place(path));
    MT_TRY(mt_file_check_name(path));
    MT_TRY(mt_path_format(script, "%s.gnuplot", path));
    MT_TRY(mt_path_format(image, "%s.tmp", path));
    MT_TRY(write_file(c, script, image, write_script));
    mt_status status = run_gnuplot(script, path);
    unlink(script);
    if (status == MT_OK && rename(image, path) != 0)
        status = MT_FAIL(MT_EIO, "plot '%.*s': %s", PATH_SHOWN, path, strerror(errno));
    if (status != MT_OK) unlink(image);
    return status;
}
