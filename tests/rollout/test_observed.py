from __future__ import annotations

from megatron_t1.rollout.engine.observed import router_dtype, router_line


def test_what_processes_say_is_read_from_the_log():
    log = "\n".join(["INFO 1", router_line("bfloat16"), "INFO 2", router_line("bfloat16"), ""])
    assert router_dtype(log) == "bfloat16"
    assert router_dtype("") == "" and router_dtype(f"x {router_line('float32')}") == ""
    assert router_dtype(f"{router_line('float32')}\n{router_line('bfloat16')}") == "bfloat16+float32"
