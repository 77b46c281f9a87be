"""Places whose mends no table tries, and why."""

_PRINTED = "a line that a command ends with; what it offers is tried as it is printed"
_PACKAGE = "a package that the tests' environment has"
_DISK = "a disk that is full"
_RUN = "a run that has taken steps; whole runs are gone on with elsewhere"
_COMPILES = "a graph that is compiled"
_FILE = "an optimizer, an objective or a layer of one's own"
_DEVICES = "devices or a compiler that can't be opened"

UNTRIED: dict[str, str] = {
    "trainer/arguments/adapter_options.py check_adapter": "factors that PEFT makes of data",
    "trainer/arguments/command_line.py lacks": _PRINTED,
    "trainer/arguments/command_line.py refuse": _PRINTED,
    "trainer/compile/search/tune.py tune": _COMPILES,
    "trainer/data/records/bucket.py copied": _DISK,
    "trainer/data/records/document_stream.py read": _RUN,
    "trainer/data/samples/template_trial.py try_template": "a template that takes its seconds to be given up",
    "trainer/data/tokenizer.py _spelt_out": "a tokenizer without bytes; its mend is another one",
    "trainer/evaluation/evaluation_command.py _load_tasks": "the harness's whole list of tasks, which takes seconds",
    "trainer/evaluation/lm.py": _PACKAGE,
    "trainer/evaluation/lm.py _loglikelihood_tokens": _COMPILES,
    "trainer/evaluation/open_model.py _saved_base": _RUN,
    "trainer/evaluation/reference_rows.py load": _RUN,
    "trainer/data/from_arguments.py check_records": "other data",
    "trainer/evaluation/teacher_rows.py _reserve": _DISK,
    "trainer/hosts/supervisor.py own_command": "a process that another command began",
    "trainer/launch/launch_command.py main": "the target's own plan, which is no message",
    "trainer/layout/recipe.py __post_init__": "a default model, of one's own sizes",
    "trainer/model/attention_probe.py our_attention": "a model of which no family here is left",
    "trainer/model/lora_options.py check_use": _FILE,
    "trainer/monitoring/callbacks.py _tell": "a tracker's server",
    "trainer/monitoring/messages.py best_unread": _RUN,
    "trainer/monitoring/messages.py check_good": _RUN,
    "trainer/prove/plain.py _adapted": _PACKAGE,
    "trainer/prove/plain.py plain_model": "PEFT's model beside ours, which the proofs make",
    "trainer/prove/small_job.py small_config": _FILE,
    "trainer/step/eval_metrics.py _refused": _COMPILES,
    "trainer/step/loss.py _forward": _COMPILES,
    "trainer/step/loss.py _own": _COMPILES,
    "trainer/step/loss.py _with_objective": _COMPILES,
    "trainer/trainer.py _trained": _RUN,
    "trainer/weights/gguf_file.py _package": _PACKAGE,
    "trainer/weights/hub_push.py push_folder": "the hub",
    "trainer/weights/quantize.py _check_written": "GPTQ's codes, which only calibration makes",
    "trainer/weights/quantize.py quantize": "a base in GGUF",
    "trainer/weights/weight_files.py unreadable": "memory that the kernel does not grant",
    "trainer/weights/weight_sources.py source": _FILE,
    "trainer/xla/cuda_plugin.py register": _PACKAGE,
    "trainer/xla/libtpu_library.py find_library": _PACKAGE,
    "trainer/xla/runtime.py _check_autograd": "a process whose devices are not open yet",
    "trainer/xla/runtime.py _fit": _DEVICES,
    "trainer/xla/runtime.py _open": _DEVICES,
    "trainer/xla/virtual_devices.py _ended": "a process that XLA aborts",
}
