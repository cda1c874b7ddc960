/* `muster convert IN OUT`: the state dict of a checkpoint as a file of its own, in this or another format. */
#include "commands.h"
#include "look.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct convert_options {
    const char *in, *out, *to, *dtype, *key, *strip_prefix, *prefix;
    flag_list rename;
    bool force, quiet;
    look_reading reading;
} convert_options;

#define AT(field) offsetof(convert_options, field)
static const flag convert_flags[] = {
    {"IN", FLAG_FILE, AT(in), NULL, NULL, 0, 0, FLAG_FREE},
    {"OUT", FLAG_FILE, AT(out), NULL, NULL, 0, 0, FLAG_FREE},
    {"to", FLAG_CHOICE, AT(to), "torch|legacy|safetensors",
     "format of OUT; default: safetensors when it ends in .safetensors, else torch", 0, 0, FLAG_FREE},
    {"dtype", FLAG_CHOICE, AT(dtype), "float32|float64|float16|bfloat16", "what floating-point tensors become", 0, 0,
     FLAG_FREE},
    {"key", FLAG_TEXT, AT(key), "PATH", "where in IN the state dict is; default: the only one", -1, 0, FLAG_FREE},
    {"strip-prefix", FLAG_TEXT, AT(strip_prefix), "TEXT", "remove it from the names that begin with it", 0, 0, FLAG_FREE},
    {"rename", FLAG_LIST, AT(rename), "FROM=TO",
     "replace what a regular expression matches in names; \\1 to \\9 are its groups; may be repeated", 0, 0, FLAG_FREE},
    {"prefix", FLAG_TEXT, AT(prefix), "TEXT", "put it before every name, after all else", 0, 0, FLAG_FREE},
    {"force", FLAG_SWITCH, AT(force), NULL, "replace OUT if it is there; it may be IN", 0, 0, FLAG_FREE},
    {"quiet", FLAG_SWITCH, AT(quiet), NULL, "do not tell what was left out, tied, converted and renamed", 0, 0, FLAG_FREE},
    LOOK_FLAGS(convert_options, reading),
};
static const char about[] =
    "Writes the state dict of a checkpoint (PyTorch's zip or legacy, TorchScript, safetensors) as a file of its own. Tied\n"
    "tensors stay tied; optimisers' state and whatever else is beside the state dict is left out and named. Nothing of\n"
    "IN is run, and OUT appears whole or not at all.\n"
    "Exit codes: 0 done, 1 IN is damaged, no checkpoint or cannot be written so, 2 bad flags, no such file, or several\n"
    "state dicts and no --key. Where it is not 0, OUT is as it was.";

static mu_file_format format_of(const convert_options *o)
{
    static const char end[] = ".safetensors";
    size_t n = strlen(o->out);
    if (o->to == NULL) {
        return n >= sizeof(end) - 1 && strcmp(o->out + n - (sizeof(end) - 1), end) == 0 ? MU_FORMAT_SAFETENSORS
                                                                                        : MU_FORMAT_TORCH;
    }
    return strcmp(o->to, "legacy") == 0 ? MU_FORMAT_LEGACY
                                        : strcmp(o->to, "safetensors") == 0 ? MU_FORMAT_SAFETENSORS : MU_FORMAT_TORCH;
}

static mu_dtype dtype_of(const char *name)
{
    static const mu_dtype floats[] = {MU_F32, MU_F64, MU_F16, MU_BF16};
    size_t i = 0;
    while (i < 3 && strcmp(name, mu_dtype_name(floats[i])) != 0) {
        i++;
    }
    return floats[i];
}

/* Names may hold anything; the ends of lines are the report's. */
static void put_lines(const char *text)
{
    while (*text != '\0') {
        size_t n = strcspn(text, "\n");
        char *line = strndup(text, n);
        if (line != NULL) {
            put_text(line);
            putchar('\n');
        }
        free(line);
        text += text[n] != '\0' ? n + 1 : n;
    }
}

static void convert(mu_checkpoint_file *k, const convert_options *o)
{
    static const char *const formats[] = {"torch zip", "torch legacy", "safetensors"};
    const char *rename[FLAG_LIST_MAX + 1] = {NULL};
    memcpy(rename, o->rename.item, (size_t)o->rename.count * sizeof(rename[0]));
    mu_convert_options c = {.format = format_of(o), .key = o->key, .strip_prefix = o->strip_prefix, .rename = rename,
                            .prefix = o->prefix, .change_dtype = o->dtype != NULL};
    if (o->dtype != NULL) {
        c.dtype = dtype_of(o->dtype);
    }
    mu_convert_report r;
    if (mu_checkpoint_convert(k, o->out, &c, &r) == MU_OK && !o->quiet) {
        put_text(o->out);
        printf(": %s, %lld tensor%s\n", formats[c.format], (long long)r.written, r.written == 1 ? "" : "s");
        put_lines(r.text);
    }
}

int cmd_convert(int argc, char **argv)
{
    convert_options o = {0};
    look l;
    int code = flags_parse("convert", about, convert_flags, &o, argc, argv);
    if (code >= 0) {
        return code;
    }
    if (!o.force && access(o.out, F_OK) == 0) {
        return cli_fail("convert", CLI_USAGE, "%s is there already; --force replaces it", o.out);
    }
    code = look_begin(&l, "convert", &o.reading);
    if (code >= 0) {
        return code;
    }
    mu_checkpoint_file *k = look_open(&l, o.in, &o.reading);
    if (k != NULL) {
        convert(k, &o);
    }
    return look_end(&l, CLI_OK);
}
