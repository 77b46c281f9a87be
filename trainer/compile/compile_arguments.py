"""The options of `scripts/compile.py` beside the training options."""

from dataclasses import dataclass

from shardwright.arguments.option_values import Checked, check_values, option


@dataclass
class CompileArguments(Checked):
    """The slice to compile for, the search, and the report; the job itself is in the training options."""

    COMMON = ("topology", "slices", "search", "tune", "report", "json")  # what the short help shows

    topology: str | None = option(None, "TPU slice to compile for, by libtpu's name: v5p:4x4x4, v5e:16x16, v6e:8x8, …")
    slices: int = option(1, "Slices of that topology, joined by the data-centre network.")
    search: bool = option(
        False,
        "Also try what would fit: smaller batches, other remat policies, other meshes; where it fits, larger batches "
        "and remat auto. Each with its estimated tokens/s, the fastest first on the page and in the JSON. Minutes for "
        "each.",
    )
    tune: int = option(
        0,
        "Search so many minutes for the fastest recipe, mesh, batch and remat, by the estimate, and report on what is "
        "found; the same command goes on with the search. 60 are a good beginning.",
    )
    report: str | None = option(None, "Write the report as an HTML page to this file.")
    json: str | None = option(None, "Write the report as JSON to this file.")
    compiler_options: str = option(
        "",
        "Options for the TPU's compiler, as `name=value name=value`, without dashes, beside those that a run sets on "
        "that chip (docs/tpu.md); `name=` takes one of those back. On a TPU, LIBTPU_INIT_ARGS.",
    )
    efficiency: str = option(
        "",
        "Parts of a peak that the estimate of a step's time takes to be reached, as `kind=value,kind=value`; "
        "docs/estimate.md has the kinds, and the values that are taken otherwise with their sources.",
    )
    libtpu: str | None = option(
        None,
        "The compiler: a version (in a folder of its own, docs/tpu.md), or the path of a libtpu.so; default: "
        "TPU_LIBRARY_PATH, else the installed one.",
    )
    only_train_step: bool = option(
        False, "Compile no other graph of the run beside the train step, to measure; the verdict is of that alone."
    )
    compile_timeout: int = option(3600, "Seconds after which a compile is given up.")

    def __post_init__(self) -> None:
        check_values(self)
        self.at_least(1, "a run takes place on at least one slice", "slices")
        self.at_least(1, "a compile takes seconds to minutes", "compile_timeout", instead=3600)
        self.at_least(0, "it is the minutes that a search may take, and 0 is no search", "tune", instead=60)
