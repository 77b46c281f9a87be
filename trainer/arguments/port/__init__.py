"""Published commands and YAML files of other trainers, in the options of this one."""
