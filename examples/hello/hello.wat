;; A WebAssembly program in text form: it needs no tool to read and none to build. It asks its host for one thing, to write
;; to standard output (WASI preview 1, `fd_write`), and has nothing else: no file, no network, no clock, no environment.
(module
  (import "wasi_snapshot_preview1" "fd_write"
    (func $fd_write (param $fd i32) (param $pieces i32) (param $count i32) (param $written i32) (result i32)))

  (memory (export "memory") 1)
  ;; One piece of output: where it begins, and how long it is.
  (data (i32.const 0) "\10\00\00\00" "\33\00\00\00")
  (data (i32.const 16) "Hello from behind a boundary that was proven first\0a")

  (func (export "_start")
    (drop (call $fd_write (i32.const 1) (i32.const 0) (i32.const 1) (i32.const 8)))))
