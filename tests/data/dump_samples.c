/* Writes samples of a data set to stdout, for the Python scripts that compare them: count, classes and dims as int64,
 * then for each sample its label as int64 and its floats.
 *
 *     dump_samples SPEC train|test SIDE CHANNELS */
#include <muster/muster.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(int argc, char **argv)
{
    if (argc != 5) {
        fprintf(stderr, "usage: dump_samples SPEC train|test SIDE CHANNELS\n");
        return 2;
    }
    mu_context *c = mu_context_open(NULL);
    mu_dataset *d = mu_dataset_open(c, argv[1], &(mu_dataset_options){
        .split = strcmp(argv[2], "test") == 0 ? MU_SPLIT_TEST : MU_SPLIT_TRAIN,
        .side = atoi(argv[3]), .channels = atoi(argv[4])});
    if (d == NULL) {
        return 1;
    }
    mu_dims dims = mu_dataset_dims(d);
    int64_t count = mu_dataset_count(d), elements = dims.dim[0] * dims.dim[1] * dims.dim[2], label = 0;
    int64_t head[5] = {count, mu_dataset_classes(d), dims.dim[0], dims.dim[1], dims.dim[2]};
    float *x = malloc((size_t)elements * sizeof(float));
    fwrite(head, sizeof(head), 1, stdout);
    for (int64_t i = 0; i < count; i++) {
        if (x == NULL || mu_dataset_get(d, i, x, &label) != MU_OK) {
            return 1;
        }
        fwrite(&label, sizeof(label), 1, stdout);
        fwrite(x, sizeof(float), (size_t)elements, stdout);
    }
    free(x);
    return mu_context_close(c) == MU_OK && fflush(stdout) == 0 ? 0 : 1;
}
