// One stream of changes for all tabs of a browser, which has only six connections for them: a SharedWorker.
"use strict";
const streams = new Map();  // address without its place → {source, ports, recent}
const MOST = 2000;
const place = (message) => Number(message.id || 0);

function open(address, after) {
  const stream = { ports: new Set(), recent: [], from: after, state: "waits" };
  stream.source = new EventSource(`${address}&after=${after}`);
  const tell = (what) => stream.ports.forEach((port) => port.postMessage(what));
  stream.source.onopen = () => { stream.state = "open"; tell({ state: "open" }); };
  stream.source.onerror = () => { stream.state = "error"; tell({ state: "error" }); };
  stream.source.onmessage = (message) => {
    const told = { data: message.data, id: message.lastEventId };
    if (JSON.parse(told.data).action === "reset") { stream.recent = []; stream.from = place(told); }
    stream.recent.push(told);
    while (stream.recent.length > MOST) stream.from = place(stream.recent.shift());
    tell(told);
  };
  streams.set(address, stream);
  return stream;
}

onconnect = (event) => {
  const port = event.ports[0];
  let address = "";
  port.onmessage = ({ data }) => {
    if (data.close) {
      const stream = streams.get(address);
      if (!stream) return;
      stream.ports.delete(port);
      if (!stream.ports.size) { stream.source.close(); streams.delete(address); }
      return;
    }
    address = data.address;
    let stream = streams.get(address);
    if (stream && data.after < stream.from) {  // it has not kept what this page missed
      stream.source.close();
      const ports = stream.ports;
      stream = open(address, data.after);
      ports.forEach((other) => stream.ports.add(other));
    }
    stream = stream || open(address, data.after);
    stream.ports.add(port);
    if (stream.state !== "waits") port.postMessage({ state: stream.state });
    stream.recent.filter((told) => place(told) > data.after).forEach((told) => port.postMessage(told));
  };
  port.start();
};
