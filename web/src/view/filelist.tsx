// Attached files: a chip with name and size; what they hold can be unfolded, or taken away before sending.

import { useState } from "preact/hooks";
import type { Picture, TextFile, Video } from "../state/types";
import { bytes } from "../text/format";
import { Icon, IconButton } from "./icons";

const size = (file: TextFile) => bytes(new Blob([file.text]).size);

export function FileList({ files }: { files: TextFile[] }) {
  if (files.length === 0) return null;
  return (
    <div class="files">
      {files.map((file, index) => (
        <details key={index} class="file">
          <summary><Icon name="file" />{file.name} <span class="faint">{size(file)}</span></summary>
          <pre tabIndex={0} role="group" aria-label={`Text of ${file.name}`}>{file.text}</pre>
        </details>
      ))}
    </div>
  );
}

export function FileChips({ files, remove }: { files: TextFile[]; remove: (index: number) => void }) {
  if (files.length === 0) return null;
  return (
    <ul class="chips" aria-label="Attached files">
      {files.map((file, index) => (
        <li key={index} class="chip">
          <Icon name="file" />
          <span class="chip-name">{file.name}</span>
          <span class="faint">{size(file)}</span>
          <IconButton icon="close" label={`Take ${file.name} away`} onClick={() => remove(index)} />
        </li>
      ))}
    </ul>
  );
}

export function PictureList({ pictures }: { pictures: Picture[] }) {
  if (pictures.length === 0) return null;
  return (
    <div class="pictures">
      {pictures.map((picture, index) => <img key={index} src={picture.uri} alt={picture.name} title={picture.name} />)}
    </div>
  );
}

export function PictureChips({ pictures, remove }: { pictures: Picture[]; remove: (index: number) => void }) {
  if (pictures.length === 0) return null;
  return (
    <ul class="chips" aria-label="Attached pictures">
      {pictures.map((picture, index) => (
        <li key={index} class="chip picture">
          <img src={picture.uri} alt="" />
          <span class="chip-name">{picture.name}</span>
          <IconButton icon="close" label={`Take ${picture.name} away`} onClick={() => remove(index)} />
        </li>
      ))}
    </ul>
  );
}

export function VideoList({ videos }: { videos: Video[] }) {
  if (videos.length === 0) return null;
  return (
    <div class="pictures">
      {videos.map((video, index) => <Film key={index} video={video} />)}
    </div>
  );
}

/** A video with its first frame and controls. A browser plays fewer kinds of files than the server reads. */
function Film({ video }: { video: Video }) {
  const [plays, setPlays] = useState(true);
  if (!plays) {
    return <p class="unplayed"><Icon name="film" />{video.name} <span class="faint">This browser cannot play it. The model is sent it.</span></p>;
  }
  return <video src={video.uri} controls muted playsInline preload="auto" title={video.name} aria-label={video.name} onError={() => setPlays(false)} />;
}

export function VideoChips({ videos, remove }: { videos: Video[]; remove: (index: number) => void }) {
  if (videos.length === 0) return null;
  return (
    <ul class="chips" aria-label="Attached videos">
      {videos.map((video, index) => (
        <li key={index} class="chip video">
          <Icon name="film" />
          <span class="chip-name">{video.name}</span>
          <IconButton icon="close" label={`Take ${video.name} away`} onClick={() => remove(index)} />
        </li>
      ))}
    </ul>
  );
}

/** Shown while files are being read. A message is sent after them. */
export function ReadingLine({ count }: { count: number }) {
  if (count === 0) return null;
  return (
    <p class="reading" role="status"><Icon name="file" />{count === 1 ? "Reading a file…" : `Reading ${count} files…`}</p>
  );
}
