/* Texts that stand where a checkpoint should be: Git LFS pointers, web pages, JSON, anything else. */
#include "io/sniff_text.h"
#include "base/text.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

#define LOOK 4096

const unsigned char *mui_find_bytes(const unsigned char *data, size_t bytes, const char *what)
{
    size_t n = strlen(what);
    for (size_t i = 0; n <= bytes && i <= bytes - n;) {
        const unsigned char *p = memchr(data + i, what[0], bytes - n + 1 - i);
        if (p == NULL || memcmp(p, what, n) == 0) {
            return p;
        }
        i = (size_t)(p - data) + 1;
    }
    return NULL;
}

static size_t after_space(const unsigned char *data, size_t bytes)
{
    size_t at = 0;
    if (bytes >= 3 && memcmp(data, "\xef\xbb\xbf", 3) == 0) {
        at = 3;
    }
    while (at < bytes && isspace(data[at])) {
        at++;
    }
    return at;
}

static bool is_json_object(const unsigned char *data, size_t bytes)
{
    size_t at = after_space(data, bytes);
    if (at == bytes || data[at] != '{') {
        return false;
    }
    at += 1 + after_space(data + at + 1, bytes - at - 1);
    return at < bytes && (data[at] == '"' || data[at] == '}');
}

bool mui_is_shard_index(const unsigned char *data, size_t bytes)
{
    return is_json_object(data, bytes) && mui_find_bytes(data, bytes, "\"weight_map\"") != NULL;
}

/* The word after `key ` at the start of a line, "" when there is none. */
static void word_of(const unsigned char *data, size_t bytes, const char *key, char *out, size_t out_bytes)
{
    char line[64];
    size_t n = 0;
    snprintf(line, sizeof(line), "\n%s ", key);
    const unsigned char *p = mui_find_bytes(data, bytes, line);
    if (p != NULL) {
        for (p += strlen(line); p < data + bytes && isgraph(*p) && n + 1 < out_bytes; p++) {
            out[n++] = (char)*p;
        }
    }
    out[n] = '\0';
}

static mu_status refuse_lfs(mu_context *c, const char *path, const unsigned char *data, size_t bytes)
{
    char oid[96], size[32];
    size_t look = bytes < LOOK ? bytes : LOOK;
    word_of(data, look, "oid", oid, sizeof(oid));
    word_of(data, look, "size", size, sizeof(size));
    return mui_fail(c, MU_ERR_FORMAT,
                    "%s: a Git LFS pointer, not the file itself: it stands for %s bytes (%s); run `git lfs pull`, or "
                    "download that file",
                    path, size[0] != '\0' ? size : "an unknown number of", oid[0] != '\0' ? oid : "no oid");
}

static bool starts_nocase(const unsigned char *data, size_t bytes, const char *with)
{
    size_t i = 0;
    for (; with[i] != '\0' && i < bytes; i++) {
        if (tolower(data[i]) != with[i]) {
            return false;
        }
    }
    return with[i] == '\0';
}

/* How the text begins, on one line and printable. */
static void beginning(const unsigned char *data, size_t bytes, char out[64])
{
    size_t n = 0, at = after_space(data, bytes);
    for (; at < bytes && n < 60; at++) {
        out[n++] = data[at] >= 0x20 && data[at] < 0x7f ? (char)data[at] : ' ';
    }
    while (n > 0 && out[n - 1] == ' ') {
        n--;
    }
    memcpy(out + n, at < bytes ? "..." : "", at < bytes ? 4 : 1);
}

mu_status mui_refuse_text(mu_context *c, const char *path, const unsigned char *data, size_t bytes)
{
    static const char *const html[] = {"<!doctype", "<html", "<head", "<body", "<script"};
    char start[64];
    size_t at = after_space(data, bytes);
    if (bytes >= 23 && memcmp(data, "version https://git-lfs", 23) == 0) {
        return refuse_lfs(c, path, data, bytes);
    }
    for (size_t i = 0; i < sizeof(html) / sizeof(html[0]); i++) {
        if (starts_nocase(data + at, bytes - at, html[i])) {
            return mui_fail(c, MU_ERR_FORMAT,
                            "%s: an HTML page, not a checkpoint: the download gave a web page (a login or error page?)",
                            path);
        }
    }
    if (starts_nocase(data + at, bytes - at, "<?xml")) {
        return mui_fail(c, MU_ERR_FORMAT, "%s: XML, not a checkpoint: the download gave an error message?", path);
    }
    if (is_json_object(data, bytes)) {
        beginning(data, bytes, start);
        return mui_fail(c, MU_ERR_FORMAT,
                        "%s: a JSON file, but no index of a sharded checkpoint (it has no weight_map): %s", path, start);
    }
    return MU_OK;
}

mu_status mui_refuse_any_text(mu_context *c, const char *path, const unsigned char *data, size_t bytes)
{
    char start[64];
    size_t look = bytes < LOOK ? bytes : LOOK;
    for (size_t i = 0; i < look; i++) {
        if ((data[i] < 0x20 && !isspace(data[i])) || data[i] == 0x7f) {
            return MU_OK;
        }
    }
    /* A letter of several bytes may be cut at the end of what is looked at. */
    bool utf8 = false;
    for (size_t cut = 0; cut < 4 && cut <= look && !utf8; cut++) {
        utf8 = mui_is_utf8((const char *)data, look - cut);
        if (look == bytes) {
            break;
        }
    }
    if (!utf8) {
        return MU_OK;
    }
    beginning(data, bytes, start);
    return mui_fail(c, MU_ERR_FORMAT, "%s: a text of %zu bytes, not a checkpoint: %s", path, bytes, start);
}
