;; Prints what runners of forges, terminals and people would obey or believe, and ends well.
(module
  (import "wasi_snapshot_preview1" "fd_write" (func $write (param i32 i32 i32 i32) (result i32)))
  (memory (export "memory") 1)
  (data (i32.const 64) "::add-mask::proven\0a  ::add-mask::passed\0a::set-output name=verdict::hacked\0a##[set-output name=verdict;]hacked\0a::error file=action.yml::pwned\0a::endgroup::\0a::stop-commands::x\0asection_end:1:plimsoll_01\0d\1b[0K\0asection_start:1:evil\0d\1b[0Kevil\0a\1b[31mred\1b]8;;http://evil.invalid\07link\1b]8;;\07\0a\e2\80\aeodd\0alast hostile line\0a")
  (func (export "_start")
    (i32.store (i32.const 0) (i32.const 64))
    (i32.store (i32.const 4) (i32.const 302))
    (drop (call $write (i32.const 1) (i32.const 0) (i32.const 1) (i32.const 32)))
    (i32.store (i32.const 0) (i32.const 64))
    (i32.store (i32.const 4) (i32.const 302))
    (drop (call $write (i32.const 2) (i32.const 0) (i32.const 1) (i32.const 32)))))
