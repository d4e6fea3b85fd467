"""Threads that share one LLM, for so many seconds: each must get its own, right answers.

python benchmarks/llm_threads.py MODEL SECONDS
"""

from __future__ import annotations

import sys
import threading
import time

from anabranch import LLM, SamplingParams

NUM_THREADS = 4


def main() -> int:
    """1 if an answer differs from the one that the same call gives alone."""
    llm = LLM(sys.argv[1], device="cpu", kv_cache_gib=0.05)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    end, wrong, answered = time.monotonic() + float(sys.argv[2]), list[str](), [0] * NUM_THREADS

    def tokens(number: int) -> list[list[int]]:
        prompts = [[4 + number, 5, 6], [4 + number, 7, 8, 9]]
        return [each.outputs[0].token_ids for each in llm.generate(prompts, params)]

    expected = [tokens(number) for number in range(NUM_THREADS)]

    def call(number: int) -> None:
        while time.monotonic() < end and not wrong:
            try:
                if tokens(number) != expected[number]:
                    wrong.append(f"thread {number} got other tokens")
            except Exception as error:
                wrong.append(f"thread {number}: {error!r}")
            answered[number] += 1

    threads = [threading.Thread(target=call, args=(number,)) for number in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(sum(answered), *wrong[:3])
    return int(bool(wrong) or not all(answered))


if __name__ == "__main__":
    sys.exit(main())
