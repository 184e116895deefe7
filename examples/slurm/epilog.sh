#!/bin/bash
# For slurm.conf: Epilog=/etc/slurm/epilog.sh. A job that was killed took its collector with it. This stores the last
# records of its runs, as the user of the job, and ends them. Slurm runs it as root on each node of the job.
#
# The prolog needs nothing, unless TIDEGAUGE_HOME is a folder of the node: then it makes that folder.
export TIDEGAUGE_HOME=/var/lib/tidegauge/$SLURM_JOB_USER
[ -d "$TIDEGAUGE_HOME/runs" ] || exit 0

for directory in "$TIDEGAUGE_HOME"/runs/*-"$SLURM_JOB_ID"-*; do
    [ -d "$directory" ] || continue
    timeout 60 runuser -u "$SLURM_JOB_USER" -- /opt/tidegauge/bin/tidegauge collect "$(basename "$directory")"
done
# A failed epilog drains the node.
exit 0
