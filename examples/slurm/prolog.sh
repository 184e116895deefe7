#!/bin/bash
# For slurm.conf: Prolog=/etc/slurm/prolog.sh. It makes a folder for the journals of the job's user on the disk of the
# node. Slurm runs it as root on each node of the job; a job finds the folder by TIDEGAUGE_HOME.
install -d -m 0755 /var/lib/tidegauge && install -d -m 0700 -o "$SLURM_JOB_USER" "/var/lib/tidegauge/$SLURM_JOB_USER"
# A failed prolog drains the node.
exit 0
