#!/bin/bash
# The wasm backend, as root and as a plain user without any privilege.
# deadline: 120

cat > "$work/hello.wat" <<'END'
(module
  (import "wasi_snapshot_preview1" "fd_write" (func $write (param i32 i32 i32 i32) (result i32)))
  (memory (export "memory") 1)
  (data (i32.const 8) "hello\n")
  (func (export "_start")
    (i32.store (i32.const 0) (i32.const 8))
    (i32.store (i32.const 4) (i32.const 6))
    (drop (call $write (i32.const 1) (i32.const 0) (i32.const 1) (i32.const 20)))))
END
for user in root stranger; do
  mkdir -p "$work/$user/artifact"
  cp "$work/hello.wat" "$work/$user/artifact/"
  run 0 "$user" --run hello.wat
  holds "$user" 'out == "hello\n" and isolation["tier"] == "container"'
done
