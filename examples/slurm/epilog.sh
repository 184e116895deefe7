#!/bin/bash
# For slurm.conf: Epilog=/etc/slurm/epilog.sh. A job that was killed took its collector with it. This stores the last
# records of its runs, as the user of the job, and ends them. Slurm runs it as root on each node of the job.
export TIDEGAUGE_HOME=/var/lib/tidegauge/$SLURM_JOB_USER

for directory in "$TIDEGAUGE_HOME"/runs/*-"$SLURM_JOB_ID"-*; do
    [ -d "$directory" ] || continue
    timeout 60 runuser -u "$SLURM_JOB_USER" -- /opt/tidegauge/bin/tidegauge collect "$(basename "$directory")"
done
# A failed epilog drains the node.
exit 0
