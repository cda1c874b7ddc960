/* Runs a fuzz target without libFuzzer: every file of a folder as it is, then damaged in ways that depend on nothing
 * but its name. For ctest; the real search is libFuzzer's.
 *
 *     fuzz_x_driver FOLDER [VARIANTS] [MOST_BYTES] */
#define _GNU_SOURCE
#include "base/rng.h"
#include "fuzz_target.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static uint8_t *slurp(const char *path, size_t most, size_t *bytes)
{
    struct stat st;
    FILE *f = stat(path, &st) == 0 && S_ISREG(st.st_mode) && (size_t)st.st_size <= most ? fopen(path, "rb") : NULL;
    if (f == NULL) {
        return NULL;
    }
    uint8_t *data = malloc((size_t)st.st_size + 1);
    *bytes = data != NULL ? fread(data, 1, (size_t)st.st_size, f) : 0;
    fclose(f);
    return data;
}

/* Damages data in place; returns its new length. */
static size_t damage(uint8_t *data, size_t bytes, mui_rng *r)
{
    static const uint8_t odd[] = {0x00, 0x01, 0x7f, 0x80, 0xff};
    int places = 1 + (int)mui_rng_below(r, 4);
    for (int i = 0; bytes > 0 && i < places; i++) {
        size_t at = (size_t)mui_rng_below(r, bytes), to = (size_t)mui_rng_below(r, bytes);
        switch (mui_rng_below(r, 5)) {
        case 0: data[at] ^= (uint8_t)(1u << mui_rng_below(r, 8)); break;
        case 1: data[at] = odd[mui_rng_below(r, sizeof(odd))]; break;
        case 2: data[at] = data[to]; break;
        case 3: { /* a piece over another */
            size_t room = bytes - (at > to ? at : to), n = room > 0 ? (size_t)mui_rng_below(r, room) % 64 : 0;
            memmove(data + at, data + to, n);
            break;
        }
        default:
            if (i == 0) {
                bytes = at; /* cut */
            }
        }
    }
    return bytes;
}

int main(int argc, char **argv)
{
    DIR *dir = argc >= 2 ? opendir(argv[1]) : NULL;
    if (dir == NULL) {
        fprintf(stderr, "usage: %s FOLDER [VARIANTS] [MOST_BYTES]\n", argv[0]);
        return 2;
    }
    long variants = argc > 2 ? atol(argv[2]) : 0, ran = 0, files = 0;
    size_t most = argc > 3 ? (size_t)atol(argv[3]) : (size_t)1 << 20;
    for (struct dirent *e; (e = readdir(dir)) != NULL;) {
        char path[4096];
        size_t bytes = 0;
        snprintf(path, sizeof(path), "%s/%s", argv[1], e->d_name);
        uint8_t *data = slurp(path, most, &bytes);
        if (data == NULL) {
            continue;
        }
        files++;
        LLVMFuzzerTestOneInput(data, bytes);
        for (long v = 0; v < variants; v++, ran++) {
            mui_rng r;
            mui_rng_init(&r, mui_hash_string(MUI_HASH_START, e->d_name), (uint64_t)v);
            uint8_t *copy = malloc(bytes + 1); /* exact, so that reading beyond it is noticed */
            memcpy(copy, data, bytes);
            size_t left = damage(copy, bytes, &r);
            uint8_t *exact = malloc(left > 0 ? left : 1);
            memcpy(exact, copy, left);
            LLVMFuzzerTestOneInput(exact, left);
            free(exact);
            free(copy);
        }
        free(data);
    }
    closedir(dir);
    printf("%ld files, %ld damaged ones\n", files, ran);
    return files > 0 ? 0 : 1;
}
