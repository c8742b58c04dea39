#!/bin/bash
# Two microVMs at once (`--jobs 2`): both run at the same time, each has its own VMM, channel and memory.
# deadline: 240
# alone

mkdir -p "$work/two"
cat > "$work/two/two.yml" <<END
version: 1
defaults: { sandbox: { backend: firecracker, image: "$shell" } }
steps:
  - { name: one, run: "echo one; sleep 6; echo end" }
  - { name: two, run: "echo two; sleep 6; echo end" }
END
start two --jobs 2 two.yml
await 60 printed two 'one'
await 60 printed two 'two'
[ "$(vmms | wc -l)" = 2 ] || fail "not two VMMs: $(vmms)"
finish 0 two
holds two '[s["isolation"]["tier"] for s in steps] == ["vm", "vm"] and all(s["verdict"] == "passed" for s in steps)'
