#!/bin/bash
# Two nodes with four cards each. Submit it with `sbatch docs/launch/slurm.sh` from the repository's folder.
#SBATCH --job-name=gpp
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=4
#SBATCH --time=01:00:00

# One task a card, all of them this command. Rank 0 plans; the report is in its run directory.
# --kill-on-bad-exit ends the others at once if a task cannot even start.
srun --kill-on-bad-exit=1 python run.py \
    model=mmt_small minibatch_size=512 steps=300 logger=none \
    cluster=dgx_h100 cluster.num_nodes=2 cluster.devices_per_node=4 \
    engine=distributed engine.launch=env engine.interface=ib0 engine.master_port=29512 \
    hydra.run.dir=outputs/slurm-"$SLURM_JOB_ID"
