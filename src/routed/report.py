def write(workdir, module, config, table):
    return table.to_string()
