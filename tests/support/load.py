"""load_engine.c as an object: an engine on libkvist that does what it is told."""
import contextlib
import select
import subprocess


class LoadEngine:
    class Died(AssertionError):
        """It ended where an answer was due."""

    def __init__(self, command: list[str], **more) -> None:
        """command: load_engine with its arguments, however it is to be run."""
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True, bufsize=1, **more)

    def tell(self, *words: object) -> None:
        """Give a command; its answer is due."""
        print(*words, file=self.process.stdin, flush=True)

    def answer(self, limit_s: float = 120.0) -> str:
        ready, _, _ = select.select([self.process.stdout], [], [], limit_s)
        assert ready, "the engine does not answer"
        line = self.process.stdout.readline()
        if not line:
            raise self.Died(f"the engine died: {self.process.wait()}")
        return line.strip()

    def ask(self, *words: object) -> str:
        self.tell(*words)
        return self.answer()

    def tally(self) -> dict[str, int]:
        """The answer that is due, when it is words and numbers."""
        parts = self.answer().split()
        return dict(zip(parts[::2], map(int, parts[1::2])))

    def numbers(self, *words: object) -> dict[str, int]:
        self.tell(*words)
        return self.tally()

    def close(self) -> int:
        """An orderly end. Returns the exit status."""
        self.process.stdin.close()
        status = self.process.wait(60)
        self.process.stdout.close()
        return status

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):  # what it did not read
            self.process.stdin.close()
        self.process.stdout.close()
