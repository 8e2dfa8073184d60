// usage: node trace_processor.js FOLDER
// Perfetto's trace processor between stdin and stdout: what its web page runs in a worker, without the browser.
"use strict";
const fs = require("node:fs");
const path = require("node:path");
const folder = process.argv[2];

class XMLHttpRequest {
    open(method, name) {
        this.path = path.join(folder, name);
    }
    send() {
        this.response = fs.readFileSync(this.path);
    }
}

// The bundle looks around for where it runs: it is to see a worker of a browser, and nothing of node.
const worker = { location: { href: "http://localhost/" } };
const surroundings = {
    self: worker,
    WorkerGlobalScope: Object,
    XMLHttpRequest,
    process: undefined,
    console: new console.Console(process.stderr),
};
const bundle = fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8");
new Function(...Object.keys(surroundings), bundle)(...Object.values(surroundings));

const port = { postMessage: (bytes) => process.stdout.write(bytes) };
worker.onmessage({ data: port });
process.stdin.on("data", (data) => port.onmessage({ data }));
