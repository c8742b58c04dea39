#!/bin/bash
# A fork bomb meets the limit of processes; the step ends, and says so.
# deadline: 240

cat > "$work/bomb.py" <<'END'
import os, time

children = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(1000)
        children += 1
except OSError as error:
    print(children, error.errno, flush=True)
    raise SystemExit(4)
END
mkdir -p "$work/bomb/artifact"
cp "$work/bomb.py" "$work/bomb/artifact/"
run 10 bomb --backend firecracker --image "$python" --pids 40 --run 'exec python3 bomb.py'
holds bomb \
  'result["exit_code"] == 4 and result["limit_hit"] == "pids" and not result["timed_out"]' \
  'int(out.split()[0]) <= 40 and out.split()[1] == "11"'
