#!/bin/sh
# Stands in for ffmpeg in tests: a link to this file runs the file `script` next to the link, with the same arguments.
. "${0%/*}/script"
