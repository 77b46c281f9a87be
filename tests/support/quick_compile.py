"""The flags with which XLA:CPU compiles a step in a quarter of the time; tests run most steps once."""

# The emitters of fusions that are the default take as long as all else.
QUICK_COMPILE = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
QUICK_COMPILE += " --xla_llvm_disable_expensive_passes=true"
# Else XLA splits each program into 32 of LLVM's modules, for cores that are taken.
QUICK_COMPILE += " --xla_cpu_parallel_codegen_split_count=1"
