/* Tunes a checkpoint on more classes, alone or on several ranks:
 *     ./tune idx:/usr/share/datasets/fashion-mnist seven.pth tuned.pth
 *     muster run -n 2 -- ./tune idx:/usr/share/datasets/fashion-mnist seven.pth tuned.pth */
#include <muster/muster.h>

int main(int argc, char **argv)
{
    if (argc != 4) {
        return 2;
    }
    mu_context *c = mu_context_open(&(mu_context_options){.seed = 1});
    mu_group *world = mu_group_from_env(c); /* alone, muster run, torchrun */

    mu_module *net = mu_resnet_cifar(c, 20, &(mu_resnet_options){.classes = 7, .in_channels = 1});
    MU_OR_DIE(c, mu_load(net, argv[2], NULL, NULL));
    MU_OR_DIE(c, mu_module_replace(net, "linear", mu_linear(c, 64, 10, NULL))); /* before or after wrapping */

    mu_ddp *ddp = mu_ddp_wrap(net, world, NULL);
    mu_optimizer *sgd = mu_sgd(net, 0.01f, &(mu_sgd_options){.momentum = 0.9f});
    mu_loader *train = mu_loader_open(
        mu_dataset_open(c, argv[1], NULL),
        &(mu_loader_options){.batch = 64, .shuffle = true, .shard = mu_group_shard(world)});
    mu_tape *t = mu_tape_new(c, NULL);
    MU_OR_DIE(c, mu_context_status(c)); /* one check for all of the above */

    mu_batch b;
    MU_OR_DIE(c, mu_loader_rewind(train, 0, 0));
    while (mu_tape_reset(t), mu_loader_next(train, t, &b)) {
        mu_tensor *loss = mu_cross_entropy(t, mu_forward(t, net, b.x), b.y);
        MU_OR_DIE(c, mu_ddp_backward_weighted(ddp, t, loss, b.samples));
        MU_OR_DIE(c, mu_optimizer_step(sgd));
    }
    MU_OR_DIE(c, mu_context_status(c));
    if (mu_group_rank(world) == 0) {
        MU_OR_DIE(c, mu_save(net, argv[3], NULL));
    }
    return mu_context_close(c) == MU_OK ? 0 : 1;
}
