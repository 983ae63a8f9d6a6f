"""told_engine.c as an object: an engine on libkvist that does what it is told."""
import select
import subprocess


class ToldEngine:
    def __init__(self, command: list[str], **more) -> None:
        """command: told_engine with its arguments, however it is to be run."""
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        **more)

    def __enter__(self) -> "ToldEngine":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def tell(self, *words: object) -> None:
        """Give an order; its figures() are due."""
        assert self.process.stdin is not None
        self.process.stdin.write((" ".join(map(str, words)) + "\n").encode())
        self.process.stdin.flush()

    def figures(self, limit_s: float = 120.0) -> dict[str, int]:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], limit_s)
        line = self.process.stdout.readline().decode() if ready else ""
        if not line:
            raise AssertionError("the engine did not answer" if not ready else
                                 f"the engine ended: {self.process.wait(10)}")
        return {name: int(value) for name, value in (word.split("=") for word in line.split())}

    def ask(self, *words: object, limit_s: float = 120.0) -> dict[str, int]:
        self.tell(*words)
        return self.figures(limit_s)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
