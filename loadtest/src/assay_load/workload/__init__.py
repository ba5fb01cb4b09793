"""What is asked of the server, and when: strict models of a workload, and the plan drawn from one."""
