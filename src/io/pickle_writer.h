/* Writes pickles of protocol 2, in the few forms that a checkpoint needs and that PyTorch's weights_only reader takes. */
#ifndef MUI_PICKLE_WRITER_H
#define MUI_PICKLE_WRITER_H

#include "base/context.h"

/* `failed` after an allocation failure or a text that cannot be written, both raised; nothing more is written then. */
typedef struct mui_pickle_writer {
    mu_context *context;
    unsigned char *data;
    size_t bytes, capacity;
    bool failed;
    bool legacy; /* persistent ids are those of the legacy format */
} mui_pickle_writer;

void mui_pk_start(mui_pickle_writer *w, mu_context *c);
void mui_pk_op(mui_pickle_writer *w, unsigned char op); /* any opcode without argument: '(' 't' 'u' '}' ']' 'N' ... */
void mui_pk_text(mui_pickle_writer *w, const char *s);
void mui_pk_int(mui_pickle_writer *w, int64_t i);
void mui_pk_uint(mui_pickle_writer *w, uint64_t i);
void mui_pk_float(mui_pickle_writer *w, double f);
void mui_pk_bool(mui_pickle_writer *w, bool b);
void mui_pk_global(mui_pickle_writer *w, const char *module, const char *name);
/* An empty OrderedDict; fill with '(' key value ... 'u'. */
void mui_pk_ordered_dict(mui_pickle_writer *w);
void mui_pk_free(mui_pickle_writer *w);

#endif
